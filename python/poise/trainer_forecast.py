"""What a Trainer's run is planned to hold before its engine is made, from its arguments and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from poise import model_view, placement, separable, trainer_balance
from poise._C import parse_bytes
from poise.forecast import Forecast, fixed_recomputation
from poise.loss import Loss
from poise.model_call import ModelCall
from poise.placement import Placement, Task
from poise.planned_loss import scalar
from poise.training_arguments import TrainingArguments


def forecast_of(
    args: TrainingArguments,
    model: nn.Module,
    units: model_view.UnitChoice,
    dataset: Any,
    collate: Callable | None,
    call: ModelCall,
    loss_fn: Callable[[Any], Loss],
    *,
    own_loss: bool = True,
) -> Forecast:
    """Plans of the run; nothing is traced yet.

    `own_loss`: what `call` makes is the loss; else other code makes one of it.
    """
    trainer_balance.check_data(dataset, args)
    blocks = model_view.find_units(model, units)
    samples = args.global_batch_size // args.world_size
    is_open = args.recompute_is_open and not model_view.is_compiled(model)
    policy = None if is_open else args.to_config(1)["checkpointing"]
    task = Task(
        args.world_size,
        args.device,
        args.engine_optimizer,
        0.9 if args.engine_optimizer == "lars" else 0.0,
        args.engine_moments,
        f"{'bf16' if args.bf16 else 'fp16'}-autocast"
        if args.autocast_dtype is not None
        else "fp32",
        args.global_batch_size,
        _bytes(args.memory_budget),
        trainer_balance.largest_usual(samples),
        args.zero_shard_group_size,
        (args.offload_gradients, args.offload_parameters, args.offload_activations),
        *fixed_recomputation(policy, model, blocks),
    )

    def sample() -> Any:
        return (collate or default_collate)([trainer_balance.longest(dataset, args, collate)])

    def may_split() -> bool:
        reason = separable.why_not_split(
            model,
            args.separable_loss,
            own_loss=own_loss and call.models_loss,
            came_counted=lambda: call.came_counted,
        )
        return reason is None

    return Forecast(task, model, blocks, sample, lambda batch: scalar(loss_fn(batch)), may_split)


def placements(args: TrainingArguments, model: nn.Module, forecast: Forecast) -> list[Placement]:
    """Where states may lie, the most promising first; all ranks find the same.

    Raises NothingFits where they do not fit the budget wherever they lie, unless on_misfit is warn.
    """
    found = args.open_placements
    if model_view.is_compiled(model):  # its blocks cannot be run one by one
        found = [place for place in found if place.stage < 3]
    return placement.in_order(found, forecast, warns=args.on_misfit == "warn")


def _bytes(budget: int | str) -> int:
    return parse_bytes(budget) if isinstance(budget, str) else budget
