"""The course of a run: counters, callbacks, and what is written of each update."""

from __future__ import annotations

import math
import time
from typing import Any

from poise import callbacks, ranks
from poise._C import Group, StepResult
from poise.metrics_log import MetricsLog, NoMetrics
from poise.progress import Progress
from poise.run_length import RunLength
from poise.schedule_arguments import updates_of
from poise.training_arguments import TrainingArguments


class RunLog:
    """Takes each update's result to the bar, the metrics file and the callbacks.

    Callbacks run on every rank, and what one rank's asks for is done on all.
    """

    def __init__(
        self,
        args: TrainingArguments,
        run: RunLength,
        metrics: MetricsLog | NoMetrics,
        bar: Progress,
        listeners: list[Any],
        group: Group,
    ) -> None:
        self.state = callbacks.TrainerState(
            max_steps=run.updates,
            num_train_epochs=run.epochs,
            is_world_process_zero=group.rank == 0,
        )
        self.control = callbacks.TrainerControl()
        self._group = group
        self._asked_by_any = any(ranks.any_of(group, [bool(listeners)]))
        self._args, self._run, self._metrics, self._bar = args, run, metrics, bar
        self._listeners = listeners
        self._every = max(1, updates_of(args.logging_steps, run.updates))
        self._begin = self._since = time.perf_counter()
        self._losses: list[float] = []  # of the updates since the last line
        self._tokens = self._line_tokens = 0.0
        self._loss_sum, self._loss_count = 0.0, 0
        self._peak_bytes = self._skipped = 0

    def running(self) -> bool:
        """Whether a further update is due; all ranks ask."""
        self._agree()
        return (
            self.state.global_step < self.state.max_steps and not self.control.should_training_stop
        )

    def evaluation_due(self) -> bool:
        """Whether a callback asked for one; all ranks ask."""
        self._agree()
        due, self.control.should_evaluate = self.control.should_evaluate, False
        return due

    def event(self, name: str, **details: Any) -> None:
        callbacks.call(self._listeners, name, self._args, self.state, self.control, **details)

    def update(self, result: StepResult) -> None:
        """Counts an update and writes its line where one is due; a skipped one always gets one."""
        self._count(result)
        self._bar.update(result, self._tokens_per_second())
        self.event("on_step_end", result=result)
        step = self.state.global_step
        due = step % self._every == 0 or step == self.state.max_steps
        due = due or (step == 1 and self._args.logging_first_step)
        if due or self.control.should_log or not result.applied:
            self.control.should_log = False
            self.write(self._line(result))

    def note(self, line: str) -> None:
        """Text for people, unless nothing is to be shown."""
        if self._group.rank == 0 and self._args.disable_tqdm is not True:
            self._bar.note(line)

    def write(self, line: dict[str, Any]) -> None:
        line = {"step": self.state.global_step, "epoch": round(self.state.epoch, 4), **line}
        self.state.log_history.append(line)
        self._metrics.write(line)
        self.event("on_log", logs=line)

    def mean_loss(self) -> float:
        """Over the updates with a finite loss."""
        return self._loss_sum / self._loss_count if self._loss_count else math.nan

    def summary(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._begin
        return {
            "train_runtime": seconds,
            "train_steps_per_second": self.state.global_step / seconds,
            "train_tokens_per_second": self._tokens / seconds,
            "train_tokens": self._tokens,
            "train_loss": self.mean_loss(),
            "skipped_updates": self._skipped,
            "peak_bytes": self._peak_bytes,
            "epoch": self.state.epoch,
        }

    def _agree(self) -> None:
        if self._asked_by_any:
            control = self.control
            asked = [control.should_training_stop, control.should_evaluate]
            asked = ranks.any_of(self._group, asked)
            control.should_training_stop, control.should_evaluate = asked

    def _count(self, result: StepResult) -> None:
        self.state.global_step += 1
        self.state.epoch = self._run.epoch_at(self.state.global_step)
        self._tokens += result.tokens
        self._line_tokens += result.tokens
        self._skipped = result.skipped
        self._peak_bytes = max(self._peak_bytes, result.peak_bytes)
        if math.isfinite(result.loss):
            self._losses.append(result.loss)
            self._loss_sum += result.loss
            self._loss_count += 1

    def _tokens_per_second(self) -> float:
        return self._line_tokens / max(time.perf_counter() - self._since, 1e-9)

    def _line(self, result: StepResult) -> dict[str, Any]:
        line = {
            "loss": sum(self._losses) / len(self._losses) if self._losses else result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.lr,
            "tokens_per_second": self._tokens_per_second(),
            "tokens": self._tokens,
            "peak_bytes": self._peak_bytes,
            "accounts": result.accounts,
            "host_bytes": result.host_bytes,
            "file_bytes": result.file_bytes,
            "status": str(result.status),
            "skipped": result.skipped,
        }
        if self._args.fp16:
            line["loss_scale"] = result.loss_scale
        if not result.applied and result.first_bad_parameter:
            line["first_bad_parameter"] = result.first_bad_parameter
        self._losses.clear()
        self._line_tokens, self._since = 0.0, time.perf_counter()
        return line
