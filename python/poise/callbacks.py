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
      num_input_tokens_seen: tokens (or samples) that counted.
      best_metric, best_global_step, best_model_checkpoint: of the best evaluation so far.
      is_world_process_zero: whether this is the first of all ranks; events come on every rank.
      is_local_process_zero: the same of its machine.
      logging_steps, eval_steps, save_steps, train_batch_size: as the arguments say.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    is_hyper_param_search: bool = False  # there is none, and no trial
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)  # keep their own
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None


@dataclasses.dataclass
class TrainerControl:
    """What a callback may ask for; each flag is cleared once served.

    Of several ranks one may ask: all then stop, evaluate, save or log.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    ended_by_signal: bool = False  # after a save; none of a callback's flags


_OF_RUN = ("ended_by_signal",)


class TrainerCallback:
    """Override what you need; every event gets (args, state, control, **details).

    Details of all events: model, processing_class, optimizer, lr_scheduler, train_dataloader,
    eval_dataloader, and within a run run_log (poise.run_log.RunLog). Where nobody gave an optimizer, it and the scheduler are views of the engine's,
    which can be read (poise.engine_view). Callbacks of transformers are called the same way; one that returns a control
    object replaces the flags.
    """

    def on_init_end(self, args, state, control, **details): ...

    def on_train_begin(self, args, state, control, **details): ...

    def on_epoch_begin(self, args, state, control, **details): ...

    def on_step_begin(self, args, state, control, **details): ...

    def on_substep_end(self, args, state, control, **details):
        """After a micro-batch that was not its window's last."""

    def on_pre_optimizer_step(self, args, state, control, **details):
        """The window's gradient is known (engine.gradient) and may be written."""

    def on_optimizer_step(self, args, state, control, **details): ...

    def on_step_end(self, args, state, control, **details):
        """`details["result"]` is the StepResult."""

    def on_epoch_end(self, args, state, control, **details): ...

    def on_log(self, args, state, control, **details):
        """`details["logs"]` is the line."""

    def on_evaluate(self, args, state, control, **details):
        """`details["metrics"]` holds eval_loss."""

    def on_predict(self, args, state, control, **details):
        """`details["metrics"]` are those of predict()."""

    def on_prediction_step(self, args, state, control, **details):
        """After a batch of an evaluation or of predict()."""

    def on_save(self, args, state, control, **details):
        """A checkpoint was made, or is being written behind the training."""

    def on_train_end(self, args, state, control, **details): ...


def made(callback: Any) -> Any:
    """A callback of a class, or the object as it is."""
    return callback() if isinstance(callback, type) else callback


def has_own(listener: Any, event: str) -> bool:
    """Whether it has a method of its own for an event."""
    method = getattr(type(listener), event, None)
    # Classes of transformers and of poise have empty ones.
    return method is not None and not method.__qualname__.startswith("TrainerCallback.")


def call(
    listeners: list[Any],
    event: str,
    args: Any,
    state: TrainerState,
    control: TrainerControl,
    **details: Any,
) -> None:
    """Calls `event` of each callback that has it, in order."""
    for listener in listeners:
        method = getattr(listener, event, None)
        if method is None:
            continue
        answer = method(args, state, control, **details)
        if answer is not None and answer is not control:
            for flag in dataclasses.fields(control):
                if flag.name not in _OF_RUN:
                    setattr(control, flag.name, bool(getattr(answer, flag.name, False)))
