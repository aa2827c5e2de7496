"""How a Trainer evaluates and predicts: over all ranks, exact by tokens, batch by batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poise import (
    eval_share,
    evaluation,
    generators,
    meta,
    model_view,
    prediction,
    ranks,
    trainer_data,
    unused_overrides,
)
from poise._C import Error
from poise.loss import Loss
from poise.prediction import PredictionOutput
from poise.run_log import RunLog
from poise.signals import EvaluationGivenUp
from poise.trainer_hooks import TrainerHooks
from poise.trainer_saving import TrainerSaves


class TrainerEvaluation(TrainerHooks):
    """Base of poise.Trainer, which makes what these methods use."""

    _before_batch: Callable[[], None] | None = None  # of the evaluation that a run makes by itself

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean loss over a dataset, weighed by tokens, and what compute_metrics makes of it. It is logged, and
        callbacks are told (on_evaluate).

        Args:
          eval_dataset: None: that of the Trainer. Of a dictionary of datasets each is evaluated, and
            its name stands in front of its metrics; the name of one of the Trainer's means that one.
          ignore_keys: outputs of the model that are no predictions.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise Error(
                "[trainer] there is no eval_dataset; give one to poise.Trainer or to evaluate()"
            )
        dataset = self._named(dataset)
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, one in dataset.items():
                metrics |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        unused_overrides.refuse(self)
        loader = self._eval_loader("get_eval_dataloader", dataset)
        if self.compute_metrics is not None and not self.args.prediction_loss_only:
            metrics = self._predict(loader, metric_key_prefix, True, ignore_keys).metrics
        else:
            metrics = self._mean_loss(loader, metric_key_prefix)
        metrics["epoch"] = self.state.epoch
        if self._before_batch is None:  # else the run tells what a subclass made of it
            self.log(metrics)
            self._event("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """What the model returns for a dataset (without its loss), in order, as numpy arrays.

        Samples need no labels; where they have them, metrics hold the loss and what
        compute_metrics makes of them. Arrays of batches that differ in length are padded with -100.
        """
        unused_overrides.refuse(self)
        loader = self._eval_loader("get_test_dataloader", test_dataset)
        output = self._predict(loader, metric_key_prefix, False, ignore_keys)
        self._event("on_predict", metrics=output.metrics)
        return output

    def _predict(
        self, loader: Any, prefix: str, with_loss: bool, ignore_keys: list[str] | None
    ) -> PredictionOutput:
        def call(batch: Any) -> tuple[Loss | None, Any, Any]:
            answer = self._outputs_of(self._on_device(batch), with_loss)
            self._event("on_prediction_step")
            return answer

        batches = evaluation.Passed(self._share_of(loader))
        with ranks.told_to_others(self._group), self._memory_explained():
            output = prediction.predict(
                self.model,
                batches,
                call,
                self._forward_scope,
                prefix,
                self.preprocess_logits_for_metrics,
                self.compute_metrics,
                self._group,
                tuple(ignore_keys or ()),
            )
            self._add_speed(output.metrics, prefix, batches)
        return output

    def _mean_loss(self, loader: Any, prefix: str) -> dict[str, float]:
        batches = evaluation.Passed(self._share_of(loader))
        with ranks.told_to_others(self._group), self._memory_explained():
            metrics = evaluation.evaluate(
                self.model, batches, self._evaluated_loss, self._forward_scope, prefix, self._group
            )
            self._add_speed(metrics, prefix, batches)
        return metrics

    def _forward_scope(self) -> contextlib.AbstractContextManager:
        """Of an evaluation: the engine's where there is one, so that the ledger counts it too."""
        if self.engine is not None:
            return self.engine.forward_scope()
        if not meta.is_meta(self.model):
            model_view.moved_to(self.model, self._device)  # where it waited for an engine
        dtype = self.args.autocast_dtype
        return torch.autocast(
            self._device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False
        )

    @contextlib.contextmanager
    def _memory_explained(self) -> Iterator[None]:
        """Batches of the training are none of an evaluation's, and stay whatever it runs out of."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                "[trainer] an evaluation ran out of memory, with batches of "
                f"{self.args.per_device_eval_batch_size} samples: give a smaller "
                f"per_device_eval_batch_size; the training's micro-batch is not touched ({error})"
            ) from error

    def _add_speed(self, metrics: dict[str, float], prefix: str, passed: evaluation.Passed) -> None:
        """Samples of all ranks, and batches of each, by transformers' names."""
        samples, batches = ranks.sums_of(self._group, [passed.samples, passed.batches])
        seconds = metrics[f"{prefix}_runtime"]
        metrics[f"{prefix}_samples_per_second"] = samples / seconds
        metrics[f"{prefix}_steps_per_second"] = math.ceil(batches / self._group.size) / seconds

    def _outputs_of(self, batch: Any, with_loss: bool) -> tuple[Loss | None, Any, Any]:
        """(loss, outputs without it, labels) of a batch, as model_call.ModelCall.predict."""
        if self._overrides("compute_loss"):
            return self._given_outputs(batch, with_loss)
        return self._call.predict(batch, with_loss)

    def _eval_loader(self, method: str, dataset: Any) -> Any:
        if self._overrides(method):
            return getattr(self, method)(dataset)
        return trainer_data.eval_batches(dataset, self.args, self._collate())

    def _evaluate_and_log(self, log: RunLog, saving: TrainerSaves) -> None:
        """An evaluation of the run's own. The training's random numbers do not depend on it; a signal
        ends it, and the resumed run begins with it."""
        self._before_batch = saving.between_batches()
        try:
            with generators.untouched():
                metrics = self.evaluate()
                log.write(metrics)
                log.event("on_evaluate", metrics=metrics)
                self._best.after_evaluation(metrics)
                if self._torch is not None:
                    self._torch.after_evaluation(metrics, self.args.metric_for_best_model or "loss")
        except EvaluationGivenUp:
            saving.evaluation_was_given_up()
        finally:
            self._before_batch = None

    def _share_of(self, loader: Any) -> Iterator[Any]:
        for batch in eval_share.share_of(loader, self._group):
            if self._before_batch is not None:
                self._before_batch()
            yield batch

    def _evaluated_loss(self, batch: Any) -> Loss:
        loss = self._loss(batch)
        self._event("on_prediction_step")
        return loss
