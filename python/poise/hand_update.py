"""One update of a Trainer micro-batch by micro-batch: where a subclass has a training_step of its own,
or a callback wants to be called before the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from poise import nonfinite
from poise._C import StepResult
from poise.engine import Engine
from poise.loss import Loss

BEFORE_STEP = ("on_pre_optimizer_step", "on_optimizer_step")


def is_wanted(listeners: list[Any]) -> bool:
    """Whether one of them has a method of its own for these events."""
    return any(_has_own(listener, event) for listener in listeners for event in BEFORE_STEP)


def _has_own(listener: Any, event: str) -> bool:
    method = getattr(type(listener), event, None)
    # Classes of transformers and of poise have empty ones.
    return method is not None and not method.__qualname__.startswith("TrainerCallback.")


def step(
    engine: Engine,
    window: list[Any],
    training_step: Callable[[Any], torch.Tensor],
    loss_fn: Callable[[Any], Loss],
    event: Callable[[str], None],
) -> StepResult:
    """The update.

    Args:
      training_step: forward and backward of a micro-batch.
      loss_fn: finds the cause of a loss that is not finite.
      event: calls the callbacks.
    """
    try:
        for number, batch in enumerate(window):
            if number > 0:
                event("on_substep_end")
            training_step(batch)
        engine.begin_update()
        event("on_pre_optimizer_step")
    except BaseException:
        engine.discard_window()
        raise
    with nonfinite.explained(engine, window, loss_fn):
        result = engine.step(last=True)
    event("on_optimizer_step")
    return result
