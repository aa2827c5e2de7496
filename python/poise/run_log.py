"""The course of a run: counters, callbacks, and what is written of each update."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from poise import callbacks, generators, noise, ranks
from poise._C import Group, StepResult
from poise.metrics_log import MetricsLog, NoMetrics, python_values
from poise.progress import Progress, line_of
from poise.run_length import RunLength
from poise.schedule_arguments import updates_of
from poise.spikes import Spikes
from poise.training_arguments import TrainingArguments
from poise.utilization import Utilization

logger = logging.getLogger("poise")

_AGREED = (
    "should_training_stop",
    "should_epoch_stop",
    "should_evaluate",
    "should_save",
    "ended_by_signal",
)
# Events between the end of an update and the next one's window.
_AT_BEGIN = ("on_epoch_begin", "on_step_begin")
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")
_KEPT = (
    "losses",
    "tokens",
    "line_tokens",
    "loss_sum",
    "loss_count",
    "peak_bytes",
    "skipped",
    "epoch",
    "epoch_first",
)


class RunLog:
    """Takes each update's result to the bar, the metrics file and the callbacks.

    Callbacks run on every rank, and what one rank's asks for is done on all.

    Args:
      details: what every event of a callback gets besides its own.
      log: is given each line and passes it to record(); None: record() itself.
      utilization: counts FLOPs.
      capacity: bytes that the peak is compared with.
      earlier: updates that the engine has applied and skipped before this run.
    """

    def __init__(
        self,
        args: TrainingArguments,
        run: RunLength,
        metrics: MetricsLog | NoMetrics,
        bar: Progress,
        listeners: list[Any],
        group: Group,
        details: dict[str, Any] | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
        *,
        utilization: Utilization,
        capacity: int,
        earlier: tuple[int, int] = (0, 0),
    ) -> None:
        every = max(1, updates_of(args.logging_steps, run.updates))
        self.state = callbacks.TrainerState(
            max_steps=run.updates,
            num_train_epochs=run.epochs,
            is_world_process_zero=group.rank == 0,
            is_local_process_zero=args.local_process_index == 0,
            logging_steps=every,
            eval_steps=args.eval_steps if args.eval_steps is not None else every,
            train_batch_size=args.per_device_train_batch_size,
        )
        self.control = callbacks.TrainerControl()
        self._details, self._log = details or {}, log or self.record
        self._group = group
        self._saves = args.save_strategy != "no"  # then a signal may ask
        at_begin = any(callbacks.has_own(one, name) for one in listeners for name in _AT_BEGIN)
        flags = ranks.any_of(group, [bool(listeners) or self._saves, at_begin])
        self._asked_by_any, self._asked_at_begin = flags
        self._is_agreed = False  # nothing has run since that may have asked for anything
        self._args, self._run, self._metrics, self._bar = args, run, metrics, bar
        self._listeners = listeners
        self._every = every
        self._last: StepResult | None = None  # of the updates since the last line
        self._begin = self._since = time.perf_counter()
        self._losses: list[float] = []  # of the updates since the last line
        self._tokens = self._line_tokens = 0.0
        self._loss_sum, self._loss_count = 0.0, 0
        self._peak_bytes = self._skipped = 0
        self._noise_scale = self._update_tokens = 0.0  # of the last update
        self._epoch = self._epoch_first = 0  # the present one, and the updates before it
        self.utilization, self._capacity = utilization, capacity
        self.earlier = earlier
        self._spikes, self._told = Spikes(), []  # of the updates since the last line
        self.last_save = ""  # of this run, or that it was resumed from

    def begin_epoch(self, number: int) -> None:
        """Also the one that a resumed run is in. Whoever asked to leave an epoch has left it."""
        begins = number != self._epoch or self.state.global_step == self._epoch_first
        if number != self._epoch:
            self._epoch, self._epoch_first = number, self.state.global_step
        self.control.should_epoch_stop = False
        with contextlib.nullcontext() if begins else generators.untouched():
            self.event("on_epoch_begin")

    def stop_due(self) -> bool:
        """Whether a callback asked to end the run; all ranks ask."""
        self._agree()
        return self.control.should_training_stop

    def leaving(self) -> bool:
        """Whether this rank's callbacks asked to leave the run or the epoch."""
        return self.control.should_training_stop or self.control.should_epoch_stop

    def drops(self, window: list[Any]) -> bool:
        """Whether one asked so before the window, which then makes no update; all ranks ask.

        As in transformers, who asks is heard after the micro-batch that comes: a window of a single
        one makes its update all the same.
        """
        left = False
        if not self._is_agreed:  # that nobody leaves
            self._agree()
            left = self.leaving() and any(ranks.any_of(self._group, [len(window) > 1]))
        self._is_agreed = False  # the window comes, where anything may ask
        return left

    def evaluation_due(self) -> bool:
        """Whether a callback asked for one; all ranks ask."""
        self._agree()
        due, self.control.should_evaluate = self.control.should_evaluate, False
        self._is_agreed &= not due
        return due

    def epoch_stop_due(self) -> bool:
        """Whether a callback asked to leave this epoch; after stop_due()."""
        due, self.control.should_epoch_stop = self.control.should_epoch_stop, False
        return due

    def saving_due(self) -> bool:
        """Whether a checkpoint is due on some rank; all ranks ask."""
        self._is_agreed &= not self._saves
        self._agree()
        due, self.control.should_save = self.control.should_save, False
        return due

    def event(self, name: str, **details: Any) -> None:
        self._is_agreed &= name in _AT_BEGIN and not self._asked_at_begin
        details = {**self._details, "run_log": self, **details}
        callbacks.call(self._listeners, name, self._args, self.state, self.control, **details)

    def update(self, result: StepResult) -> None:
        """Counts an update and writes its line where one is due; a skipped one always gets one."""
        self._count(result)
        self._bar.update(result, self._line_tokens / self._seconds())
        self.event("on_step_end", result=result)
        self._look(result)
        step, strategy = self.state.global_step, self._args.logging_strategy
        due = strategy == "steps" and (step % self._every == 0 or step == self.state.max_steps)
        due = due or (step == 1 and self._args.logging_first_step)
        self._last = result
        if due or self.control.should_log or not result.applied:
            self.control.should_log = False
            self.write(self._line(result))

    def end_epoch(self) -> None:
        """Writes the epoch's line, where lines are asked for by epochs."""
        if self._args.logging_strategy == "epoch" and self._last is not None:
            self.write(self._line(self._last))

    def note(self, line: str) -> None:
        """Text for people, unless log_level asks for less."""
        if self._group.rank == 0 and not self._args.is_quiet:
            self._bar.note(line)

    def write(self, line: dict[str, Any]) -> None:
        """A line, by way of the Trainer's log()."""
        self._log(line)

    def record(self, line: dict[str, Any]) -> None:
        """A line into history, file and callbacks."""
        line = python_values(line)
        line = {"step": self.state.global_step, "epoch": round(self.state.epoch, 4), **line}
        self.state.log_history.append(line)
        self._metrics.write(line)
        if len(line) > 2:
            self.note(line_of(line, self.state.max_steps))
        self.event("on_log", logs=line)

    def plan(self, plan: dict[str, Any]) -> None:
        """What was planned and what it took (trainer_balance.metrics), into the metrics file."""
        self._metrics.write({"step": self.state.global_step, "plan": plan})

    def samples(self, texts: list[str]) -> None:
        """What the model says now, for people and into the metrics file."""
        step = self.state.global_step
        for text in texts:
            self.note(f"update {step}/{self.state.max_steps}  sample: {text}")
        self._metrics.write({"step": step, "samples": texts})

    def end(self) -> dict[str, float]:
        """The run's last line, as transformers logs it before on_train_end; the metrics of train()."""
        metrics = self.summary()
        if self._noise_scale > 0 and self._update_tokens > 0:
            self.note(noise.advice(self._noise_scale, self._update_tokens))
        self.state.total_flos = metrics["total_flos"]
        self.write(metrics)
        return metrics

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run writes the lines of the unbroken one."""
        sums = {name: getattr(self, f"_{name}") for name in _KEPT}
        return sums | {
            "global_step": self.state.global_step,
            "log_history": self.state.log_history,
            "lines": self._metrics.lines,
            "best": {name: getattr(self.state, name) for name in _BEST},
            "spikes": self._spikes.kept(),
            "earlier": list(self.earlier),
        }

    def go_on(self, kept: dict[str, Any]) -> None:
        """Goes on from there; lines that were written later are dropped from the file."""
        for name in _KEPT:
            setattr(self, f"_{name}", kept[name])
        self.state.global_step = kept["global_step"]
        self.state.epoch = self._passes()
        self.state.log_history = kept["log_history"]
        for name, value in kept.get("best", {}).items():
            setattr(self.state, name, value)
        self._spikes.go_on(kept.get("spikes", {}))
        self.earlier = tuple(kept.get("earlier", (0, 0)))
        self._metrics.go_on_after(kept["lines"])

    def state_file(self) -> dict[str, Any]:
        """The names of transformers' trainer_state.json."""
        state = self.state
        return {
            **{name: getattr(state, name) for name in _BEST},
            "epoch": state.epoch,
            "global_step": state.global_step,
            "is_world_process_zero": state.is_world_process_zero,
            "log_history": state.log_history,
            "logging_steps": self._every,
            "max_steps": state.max_steps,
            "num_train_epochs": state.num_train_epochs,
            "train_batch_size": self._args.per_device_train_batch_size,
        }

    def mean_loss(self) -> float:
        """Over the updates with a finite loss."""
        return self._loss_sum / self._loss_count if self._loss_count else math.nan

    def summary(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._begin
        return {
            "train_runtime": seconds,
            "train_steps_per_second": self.state.global_step / seconds,
            "train_samples_per_second": self._samples() / seconds,
            "train_tokens_per_second": self._tokens / seconds,
            "train_tokens": self._tokens,
            "train_loss": self.mean_loss(),
            "total_flos": self.utilization.flops,
            "skipped_updates": self._skipped,
            "peak_bytes": self._peak_bytes,
            "epoch": self.state.epoch,
        }

    def _samples(self) -> float:
        """About how many: the last micro-batches of an epoch may be smaller."""
        run, full = self._run, self._args.accumulation * self._args.world_size
        batches = run.batches_of(self.state.global_step) * full / run.window_of(run.ramp)
        if self._run.batches_per_epoch is not None:
            batches = min(batches, self.state.epoch * self._run.batches_per_epoch)
        return batches * self._args.per_device_train_batch_size

    def _agree(self) -> None:
        """What one rank's callbacks ask for becomes what all do; the ranks wait for each other, so only
        where something may have asked since the last time."""
        if self._asked_by_any and not self._is_agreed:
            control = self.control
            asked = [getattr(control, name) for name in _AGREED]
            for name, asked_by_any in zip(_AGREED, ranks.any_of(self._group, asked), strict=True):
                setattr(control, name, asked_by_any)
        self._is_agreed = self._group.size > 1

    def _count(self, result: StepResult) -> None:
        self.state.global_step += 1
        self.state.epoch = self._passes()
        self._tokens += result.tokens
        self.state.num_input_tokens_seen = int(self._tokens)
        self._line_tokens += result.tokens
        self._noise_scale, self._update_tokens = result.noise_scale, result.tokens
        self._skipped = result.skipped - self.earlier[1]
        self._peak_bytes = max(self._peak_bytes, result.peak_bytes)
        if math.isfinite(result.loss):
            self._losses.append(result.loss)
            self._loss_sum += result.loss
            self._loss_count += 1

    def _look(self, result: StepResult) -> None:
        """Warns of a loss or norm out of the common, once for each."""
        values = {"loss": result.loss, "grad_norm": result.grad_norm}
        for text in self._spikes.look(self.state.global_step, values):
            self._told.append(text)
            if self._group.rank == 0:
                logger.warning("[trainer] %s", text)

    def _passes(self) -> float:
        first = self._epoch_first
        if (
            self._run.updates_per_epoch is None
        ):  # as transformers has it: of a pass as long as the run
            return self._epoch + (self.state.global_step - first) / self._run.updates
        return self._epoch + self._run.part_of_epoch(self.state.global_step - first, first)

    def _seconds(self) -> float:
        """Since the last line."""
        return max(time.perf_counter() - self._since, 1e-9)

    def _line(self, result: StepResult) -> dict[str, Any]:
        seconds = self._seconds()
        mfu = self.utilization.take(seconds)
        line = {
            "loss": sum(self._losses) / len(self._losses) if self._losses else result.loss,
            "grad_norm": result.grad_norm,
            "clipped_norm": result.clipped_norm,
            "learning_rate": result.lr,
            "tokens_per_second": self._line_tokens / seconds,
            "tokens": self._tokens,
            "peak_bytes": self._peak_bytes,
            "memory_percent": round(100 * self._peak_bytes / self._capacity, 2),
            "accounts": result.accounts,
            "host_bytes": result.host_bytes,
            "file_bytes": result.file_bytes,
            "status": str(result.status),
            "skipped": self._skipped,
        }
        if mfu is not None:
            line["mfu"] = mfu
        if self._args.noise_scale:
            line["noise_scale"] = result.noise_scale
        if self._told:
            line["spikes"], self._told = self._told, []
        if self._args.fp16:
            line["loss_scale"] = result.loss_scale
        if not result.applied and result.first_bad_parameter:
            line["first_bad_parameter"] = result.first_bad_parameter
        self._losses.clear()
        self._last = None
        self._line_tokens, self._since = 0.0, time.perf_counter()
        return line
