"""Hooks into a Trainer's run, with the event names of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class TrainerState:
    """Where a run is.

    Attributes:
      global_step: windows done, applied or not.
      max_steps: windows of the whole run.
      epoch: passes over the data, with fraction.
      log_history: every logged line.
      is_world_process_zero: whether this is the first of all ranks; events come on every rank.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    is_world_process_zero: bool = True


@dataclasses.dataclass
class TrainerControl:
    """What a callback may ask for; each flag is cleared once served.

    Of several ranks one may ask: all then stop, evaluate or log.
    """

    should_training_stop: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class TrainerCallback:
    """Override what you need; every event gets (args, state, control, **details)."""

    def on_train_begin(self, args, state, control, **details): ...

    def on_epoch_begin(self, args, state, control, **details): ...

    def on_step_begin(self, args, state, control, **details): ...

    def on_step_end(self, args, state, control, **details):
        """`details["result"]` is the StepResult."""

    def on_epoch_end(self, args, state, control, **details): ...

    def on_log(self, args, state, control, **details):
        """`details["logs"]` is the line."""

    def on_evaluate(self, args, state, control, **details):
        """`details["metrics"]` holds eval_loss."""

    def on_train_end(self, args, state, control, **details): ...


def call(callbacks: list[Any], event: str, *state: Any, **details: Any) -> None:
    """Calls `event` of each callback that has it, in order."""
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(*state, **details)
