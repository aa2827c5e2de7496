"""A DeepSpeed file beside a Trainer's arguments: TrainingArguments(deepspeed="ds.json").

"auto" and what the file leaves open come from the arguments; a number that is said on both sides must
be the same one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poise._C import Error
from poise.deepspeed import optimizers, schedules
from poise.deepspeed.config import Settings, read
from poise.schedule_arguments import updates_of

if TYPE_CHECKING:
    from poise.training_arguments import TrainingArguments

logger = logging.getLogger("poise")


def read_for(args: TrainingArguments) -> Settings:
    """What the file says; raises Error where it says other than the arguments."""
    settings = read(args.deepspeed, args.world_size)
    values = settings.values
    total = args.per_device_train_batch_size * args.accumulation * args.world_size
    pairs = [
        ("train_batch_size", "the global batch", total),
        (
            "train_micro_batch_size_per_gpu",
            "per_device_train_batch_size",
            args.per_device_train_batch_size,
        ),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", args.accumulation),
        ("gradient_clipping", "max_grad_norm", args.max_grad_norm),
        ("optimizer.params.lr", "learning_rate", args.learning_rate),
        ("optimizer.params.betas", "adam_beta1, adam_beta2", [args.adam_beta1, args.adam_beta2]),
        ("optimizer.params.eps", "adam_epsilon", args.adam_epsilon),
        ("optimizer.params.weight_decay", "weight_decay", args.weight_decay),
    ]
    for path, name, value in pairs:
        if path in values and values[path] != value:
            raise Error(
                f"[deepspeed] {path} is {values[path]}, and {name} of TrainingArguments {value}; "
                'make them the same, or write "auto" into the file'
            )
    for ours, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if getattr(args, ours) and values.get(f"{other}.enabled"):
            raise Error(
                f"[deepspeed] {other}.enabled is true, and {ours} of TrainingArguments too; choose one"
            )
    settings.tell_notes()
    if settings.monitor.enabled:
        logger.warning(
            "[deepspeed] the file's monitors write nothing in a Trainer: report_to says what is written"
        )
    return settings


def sections(args: TrainingArguments) -> dict[str, dict[str, Any]]:
    """What the file changes of the engine's settings: precision and sharding."""
    settings = args.deepspeed_settings
    changed: dict[str, dict[str, Any]] = {"zero": settings.engine["zero"]}
    if settings.engine["offload"]:
        changed["offload"] = settings.engine["offload"]
    precision = settings.engine.get("precision")
    if precision is None and (args.bf16 or args.fp16):
        dtype = "bf16" if args.bf16 else "fp16"
        # "auto" means DeepSpeed's way: 16-bit parameters with fp32 masters.
        low = f"{dtype}.enabled" in settings.auto
        precision = {"dtype": dtype, "parameters": dtype if low else "fp32"}
    if precision is not None:
        changed["precision"] = precision
    return changed


def moments(args: TrainingArguments) -> dict[str, str]:
    """What the file says of the optimizer's moments, as settings of the engine."""
    given = args.deepspeed_settings.engine["optimizer"]
    return {"moments": given["moments"]} if "moments" in given else {}


def optimizer(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer | None:
    """The file's; None: it has none, and the arguments' own holds."""
    settings = args.deepspeed_settings
    if settings is None or settings.optimizer is None:
        return None
    kind, params = settings.optimizer
    of_arguments = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    filled = {
        name: value
        for name, value in of_arguments.items()
        if f"optimizer.params.{name}" in settings.auto
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return optimizers.make(kind, {**params, **filled}, trained)


def has_scheduler(args: TrainingArguments) -> bool:
    settings = args.deepspeed_settings
    return settings is not None and settings.scheduler is not None


def scheduler(made_for: torch.optim.Optimizer, args: TrainingArguments, updates: int) -> Any:
    """The file's."""
    settings = args.deepspeed_settings
    kind, params = settings.scheduler
    of_arguments = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": max(1, updates_of(args.warmup_steps, updates)),
        "total_num_steps": updates,
    }
    open_ones = [
        path.rsplit(".", 1)[1] for path in settings.auto if path.startswith("scheduler.params.")
    ]
    unknown = [name for name in open_ones if name not in of_arguments]
    if unknown:
        raise Error(f'[deepspeed] scheduler.params.{unknown[0]} is "auto"; give a number')
    return schedules.make(kind, made_for, {**params, **{n: of_arguments[n] for n in open_ones}})
