"""poise.wrap: a torch loop goes on as it is written, and trains by an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from poise import eval_share, model_view, torch_optimizer, torch_settings
from poise._C import Error
from poise.config import ConfigLike, read_config, settings_of
from poise.engine import Engine
from poise.wrapped_model import WrappedModel


class Wrapped(NamedTuple):
    """What poise.wrap returns; the optimizer and the scheduler are the given objects."""

    model: WrappedModel
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: Any


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    loader: Iterable[Any] | None = None,
    *,
    accumulation: int = 1,
    config: Mapping[str, Any] | None = None,
    units: model_view.UnitChoice = None,
    group: Any = None,
) -> Wrapped:
    """Hands a model and its torch optimizer to an engine.

    The loop then says model.backward(loss), or loss.backward() as before, of the micro-batch's mean: not
    divided by the accumulation. It says model.clip_grad_norm_(...) for torch's function; optimizer.step(),
    scheduler.step() and optimizer.zero_grad() stay where they are, once per micro-batch, and act once per
    update. zero_grad() after the backward of a window's last micro-batch drops the window, as in a loop that
    leaves out an update. Nothing is clipped unasked.

    Two things are not as in torch. torch.nn.utils.clip_grad_norm_ finds no `.grad`, so that it returns
    0 and clips nothing, unsaid: model.clip_grad_norm_ or optimizer.max_grad_norm in `config` clips.
    And a parameter that no loss of a window reached has a gradient of zero, not none: weight decay
    and moments move it, where torch skips it; freeze it, or give it a group with weight_decay 0.

    Args:
      model: trained in place; gradients are the engine's, `.grad` stays empty. What the optimizer
        leaves out is frozen, with a warning.
      optimizer: torch.optim.AdamW, Adam or SGD, or one of poise.optimizers, with its groups,
        settings and state.
      scheduler: torch's schedulers of that optimizer (one, or a list): they step once per applied
        update, or once an epoch where the loop asks for that. ReduceLROnPlateau, which watches a
        metric, steps whenever it is asked.
      loader: gives the batches; known to poise, the last window of an epoch may be short, and a
        micro-batch weighs as many samples as it has.
      accumulation: micro-batches of one update on a rank.
      config: further settings of the engine (precision, checkpointing, zero, memory, ...).
      units, group: as in poise.Engine.

    Raises poise.Error on an optimizer without a kernel, and on settings that the torch objects
    have already.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Error(
            f"[loop] the optimizer is {type(optimizer).__name__}; give a torch.optim.AdamW, Adam or "
            "SGD, or use poise.Engine, which has its own"
        )
    schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]
    schedulers = [one for one in schedulers if one is not None]
    _check_schedulers(optimizer, schedulers, accumulation)
    settings = _settings(optimizer, accumulation, config)
    with torch_optimizer.left_out_frozen(model, optimizer):
        engine = Engine(model, settings, units, group)
        with engine.unmade_by_failure():
            if loader is not None:
                _check_ranks(loader, engine)
            wrapped = WrappedModel(engine, optimizer, loader, schedulers)
    for one in schedulers:
        gate(one, wrapped)
    return Wrapped(wrapped, optimizer, scheduler, wrapped.loader)


def gate(scheduler: Any, model: WrappedModel) -> None:
    """Its step() acts where a window is not open, and was applied (WrappedModel.schedules_step)."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return
    step, seen = _ungated(scheduler, "step"), model.applied

    def after_updates(*args: Any, **kwargs: Any) -> None:
        nonlocal seen
        if model.schedules_step(seen):
            seen = model.applied
            step(*args, **kwargs)

    of_scheduler = _ungated(scheduler, "state_dict")

    def without_functions() -> dict[str, Any]:
        return {name: v for name, v in of_scheduler().items() if name not in gates}

    gates = {"step": after_updates, "state_dict": without_functions}
    after_updates.ungated, without_functions.ungated = step, of_scheduler
    for name, function in gates.items():
        setattr(scheduler, name, function)


def _ungated(scheduler: Any, name: str) -> Any:
    """Its method without the gate of an earlier wrap(), whose loop may have ended within a window."""
    method = getattr(scheduler, name)
    return getattr(method, "ungated", method)


def _settings(
    optimizer: torch.optim.Optimizer, accumulation: int, config: ConfigLike
) -> dict[str, Any]:
    given = settings_of(read_config(config))
    default = settings_of(read_config(None))
    for section in ("optimizer", "schedule"):
        changed = [
            f"{section}.{key}"
            for key, value in given[section].items()
            if value != default[section][key] and key not in ("max_grad_norm", "moments")
        ]
        if changed:
            raise Error(
                f"[loop] the settings have {changed[0]}, which the torch {section.replace('schedule', 'scheduler')} "
                "says already; leave it out"
            )
    if given["batch"]["accumulation"] not in (0, accumulation) and accumulation != 1:
        raise Error(
            f"[loop] accumulation is {accumulation}, and batch.accumulation in the settings "
            f"{given['batch']['accumulation']}; leave one out"
        )
    asked = config.get("optimizer", {}) if isinstance(config, Mapping) else {}
    given["optimizer"] = {
        **torch_settings.to_settings(optimizer),
        "max_grad_norm": asked.get("max_grad_norm", 0.0),
        "moments": given["optimizer"]["moments"],
    }
    if accumulation != 1 or not given["batch"]["accumulation"]:
        given["batch"]["accumulation"] = accumulation
    return given


def _check_schedulers(optimizer: Any, schedulers: list[Any], accumulation: int) -> None:
    for one in schedulers:
        if getattr(one, "optimizer", optimizer) is not optimizer:
            raise Error("[loop] the scheduler belongs to another optimizer; give this one's")
    watched = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if watched and not schedulers and accumulation > 1:
        raise Error(
            "[loop] the optimizer has a scheduler that poise.wrap was not given: it would step once "
            "per micro-batch; give scheduler="
        )


def _check_ranks(loader: Any, engine: Engine) -> None:
    if engine.group.size == 1 or not isinstance(loader, DataLoader):
        return
    if not eval_share.splits_itself(loader):
        raise Error(
            f"[loop] the loader gives all {engine.group.size} ranks the same samples; give its "
            "DataLoader a torch DistributedSampler"
        )
