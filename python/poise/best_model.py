"""Which evaluation of a run was the best, and the model of that moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from poise._C import Error
from poise.engine import Engine
from poise.run_log import RunLog
from poise.trainer_saving import ModelFiles
from poise.training_arguments import TrainingArguments


class BestModel:
    """Compares evaluations by metric_for_best_model, and keeps the best one's state apart.

    It lies in output_dir/best/checkpoint-N, where save_total_limit does not reach it. All ranks make
    the same calls and have the same metrics.
    """

    def __init__(self, args: TrainingArguments, engine: Engine, log: RunLog, first: bool) -> None:
        self._args, self._engine, self._log, self._first = args, engine, log, first
        self._keeps = args.load_best_model_at_end or args.save_strategy == "best"

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Raises Error where the metrics lack the one that is to decide."""
        wanted = self._args.metric_for_best_model
        if wanted is None:
            return
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name not in metrics:
            raise Error(
                f"[trainer] metric_for_best_model is {wanted!r}, but an evaluation gave "
                f"{', '.join(metrics)}; name one of these"
            )
        state, value = self._log.state, metrics[name]
        if not self._is_better(value, state.best_metric):
            return
        state.best_metric, state.best_global_step = value, state.global_step
        if self._keeps:
            self._save()

    def load(self) -> None:
        """The best one's parameters and buffers, at the end of a run that asked for them."""
        state = self._log.state
        if not self._args.load_best_model_at_end or state.best_model_checkpoint is None:
            return
        self._engine.finish_save()
        self._engine.load(state.best_model_checkpoint, weights_only=True)
        self._log.note(
            f"the model is that of update {state.best_global_step}: "
            f"{self._args.metric_for_best_model} {state.best_metric:.6g}"
        )

    def _is_better(self, value: float, best: float | None) -> bool:
        """A NaN never is: nothing would be better than one that came first."""
        greater = self._args.greater_is_better
        if best is None or math.isnan(best):
            best = -math.inf if greater else math.inf
        return value > best if greater else value < best

    def _save(self) -> None:
        files = ModelFiles(self._engine, self._first)
        self._log.state.best_model_checkpoint = self._engine.save(
            Path(self._args.output_dir) / "best",
            name=f"checkpoint-{self._log.state.global_step}",
            total_limit=1,
            extra=files.write,
        )
