"""poise.initialize: DeepSpeed's entry point over an engine of poise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from poise import model_view, ranks, torch_optimizer, torch_settings
from poise._C import Error
from poise.config import keeps_whole
from poise.deepspeed import launch, optimizers, schedules
from poise.deepspeed.config import Settings, read
from poise.deepspeed.engine import DeepSpeedEngine
from poise.engine import Engine

logger = logging.getLogger("poise")

# "auto" would leave them at a default that nobody asked for.
_DECIDED_HERE = (
    "bf16.enabled", "fp16.enabled", "gradient_accumulation_steps", "gradient_clipping",
    "zero_optimization.stage",
)  # fmt: skip
_LR = 5e-5  # poise's default where nobody names an optimizer


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer, Any, Any]:
    """(engine, optimizer, loader, scheduler) as DeepSpeed's function of that name.

    Args:
      args: an object whose deepspeed_config is the path of the JSON file, unless config is given.
      model: trained in place, on this rank's device.
      optimizer: a torch optimizer, or a function that makes one of parameters; else what the file
        says.
      model_parameters: those to train, or groups of them, for the optimizer of the file.
      training_data: a dataset; its batches have train_micro_batch_size_per_gpu samples.
      lr_scheduler: torch's, or a function that makes one of the optimizer; else what the file says.
        The engine steps it once per applied update.
      collate_fn: makes a batch of a list of samples.
      config, config_params: path, dictionary or JSON text of DeepSpeed's settings (docs/deepspeed.md).
      mpu, mesh_param: refused: all ranks are data-parallel.
      distributed_port, dist_init_required: accepted; the launcher's environment says it.
    """
    if not isinstance(model, nn.Module):
        raise Error(f"[deepspeed] model is {type(model).__name__}; give a torch.nn.Module")
    if mpu is not None or mesh_param is not None:
        raise Error("[deepspeed] mpu and mesh_param: poise has data-parallel ranks only")
    launch.join()
    device = ranks.device()
    settings = read(_config_of(args, config, config_params), ranks.here().size)
    for path in _DECIDED_HERE:
        _refuse_auto(path, settings)
    if ranks.here().rank == 0:
        settings.tell_notes()
    if keeps_whole(settings.engine):
        model_view.moved_to(model, device)
    optimizer = _optimizer(optimizer, model, model_parameters, settings)
    scheduler = _scheduler(lr_scheduler, optimizer, settings)
    limit = settings.engine["optimizer"]
    sections = {**settings.engine, "optimizer": {**torch_settings.to_settings(optimizer), **limit}}
    loader = None
    if training_data is not None:
        loader = _loader(training_data, settings, collate_fn)
    with torch_optimizer.left_out_frozen(model, optimizer):
        engine = Engine(model, sections, device=device)
        with engine.unmade_by_failure():
            wrapped = DeepSpeedEngine(engine, optimizer, scheduler, loader, settings)
    return wrapped, optimizer, wrapped.loader, scheduler


def _config_of(args: Any, *given: Any) -> Any:
    given = [one for one in given if one is not None]
    path = getattr(args, "deepspeed_config", None)
    if path is not None:
        given.append(path)
    if len(given) != 1:
        what = "no settings" if not given else "settings twice"
        raise Error(f"[deepspeed] {what}: give config=, or args.deepspeed_config, one of them")
    return given[0]


def _optimizer(
    given: Any, model: nn.Module, parameters: Any, settings: Settings
) -> torch.optim.Optimizer:
    if parameters is None:
        parameters = [p for p in model.parameters() if p.requires_grad]
    parameters = list(parameters)
    if isinstance(given, torch.optim.Optimizer):
        if settings.optimizer is not None:
            logger.info("[deepspeed] the optimizer given to initialize counts, not the file's")
        return given
    if callable(given):
        return given(parameters)
    if given is not None:
        raise Error(
            f"[deepspeed] optimizer is {type(given).__name__}; give a torch optimizer, or a function "
            "that makes one"
        )
    if settings.optimizer is None:
        logger.warning("[deepspeed] no optimizer is given: AdamW with a learning rate of %g", _LR)
        return torch.optim.AdamW(parameters, lr=_LR, weight_decay=0.0)
    _refuse_auto("optimizer.params.", settings)
    return optimizers.make(*settings.optimizer, parameters)


def _scheduler(given: Any, optimizer: torch.optim.Optimizer, settings: Settings) -> Any:
    if given is not None:
        makes = callable(given) and not hasattr(given, "step")
        return given(optimizer) if makes else given
    if settings.scheduler is None:
        return None
    kind, params = settings.scheduler
    _refuse_auto("scheduler.params.", settings)
    return schedules.make(kind, optimizer, params)


def _refuse_auto(prefix: str, settings: Settings) -> None:
    open_ones = [path for path in settings.auto if path.startswith(prefix)]
    if open_ones:
        raise Error(
            f'[deepspeed] {open_ones[0]} is "auto", which a Trainer fills in from its arguments; '
            "give a value, or leave it out"
        )


def _loader(data: Any, settings: Settings, collate: Callable | None) -> Any:
    if isinstance(data, DataLoader):
        return data
    if settings.micro_batch is None:
        raise Error(
            "[deepspeed] training_data, but no train_micro_batch_size_per_gpu; give the size of its "
            "batches"
        )
    place, sampler = ranks.here(), None
    if not isinstance(data, IterableDataset):
        sampler = RandomSampler(data)
        if place.local is not None:  # launched: DeepSpeed's order, on one rank too
            sampler = DistributedSampler(data, num_replicas=place.size, rank=place.rank)
    return DataLoader(
        data,
        batch_size=settings.micro_batch,
        sampler=sampler,
        collate_fn=collate,
        drop_last=settings.drop_last,
        pin_memory=torch.cuda.is_available(),
    )
