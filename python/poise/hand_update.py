"""One update of a Trainer micro-batch by micro-batch: where a subclass has a training_step of its own,
or a callback wants to be called before its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from poise import nonfinite, ranks
from poise._C import StepResult
from poise.callbacks import has_own
from poise.engine import Engine
from poise.loss import Loss
from poise.run_log import RunLog

WITHIN = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


def is_wanted(listeners: list[Any]) -> bool:
    """Whether one of them has a method of its own for these events."""
    return any(has_own(listener, event) for listener in listeners for event in WITHIN)


def step(
    engine: Engine,
    window: list[Any],
    training_step: Callable[[Any], torch.Tensor],
    loss_fn: Callable[[Any], Loss],
    log: RunLog,
    counts: Sequence[float] = (),
    end_is_asked: Callable[[], bool] = lambda: False,
) -> StepResult | None:
    """The update; None where a callback asked to leave run or epoch between two micro-batches.

    Args:
      training_step: forward and backward of a micro-batch.
      loss_fn: finds the cause of a loss that is not finite.
      log: calls the callbacks.
      counts: of the window, of a loss with several terms.
      end_is_asked: whether the window shall be dropped on all ranks: asked before every micro-batch.
    """
    left = False
    try:
        if counts:
            engine.begin_window(counts)
        for number, batch in enumerate(window):
            if number > 0:
                log.event("on_substep_end")
                left = left or log.leaving()
            if left and engine.group.size == 1:
                break  # several ranks need each other to the end of the window
            if end_is_asked():
                engine.drop_window()
            _or_lost(engine, training_step, batch)
        if engine.group.size > 1:
            engine.begin_update()  # first: a rank that lost the window waits for the others' sums
        if any(ranks.any_of(engine.group, [left])):
            engine.discard_window()
            return None
        if engine.group.size == 1:
            engine.begin_update()
        log.event("on_pre_optimizer_step")
    except BaseException:
        engine.discard_window()
        raise
    with nonfinite.explained(engine, window, loss_fn, log.last_save):
        result = engine.step(last=True)
    log.event("on_optimizer_step")
    return result


def _or_lost(engine: Engine, training_step: Callable[[Any], torch.Tensor], batch: Any) -> None:
    """Tells the other ranks where memory ran out outside of what the engine runs."""
    lost = engine.lost_windows
    try:
        training_step(batch)
        return
    except torch.OutOfMemoryError as error:
        why = str(error)
    # Out here the failed forward's tensors, which the exception's frames hold, are gone.
    if engine.lost_windows == lost:
        engine.lose_window(why)
    raise torch.OutOfMemoryError(why)
