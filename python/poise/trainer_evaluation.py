"""How a Trainer evaluates and predicts: over all ranks, exact by tokens, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from poise import eval_share, evaluation, generators, prediction, ranks, trainer_data
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
        """Mean loss over a dataset, weighed by tokens, and what compute_metrics makes of it.

        Args:
          eval_dataset: None: that of the Trainer. Of a dictionary of datasets each is evaluated, and
            its name stands in front of its metrics.
          ignore_keys: outputs of the model that are no predictions.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise Error(
                "[trainer] there is no eval_dataset; give one to poise.Trainer or to evaluate()"
            )
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, one in dataset.items():
                metrics |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        loader = self._eval_loader("get_eval_dataloader", dataset)
        if self.compute_metrics is not None and not self.args.prediction_loss_only:
            return self._predict(loader, metric_key_prefix, True, ignore_keys).metrics
        with ranks.told_to_others(self._group):
            return evaluation.evaluate(
                self.model,
                self._share_of(loader),
                self._evaluated_loss,
                self._forward_scope,
                metric_key_prefix,
                self._group,
            )

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

        with ranks.told_to_others(self._group):
            return prediction.predict(
                self.model,
                self._share_of(loader),
                call,
                self._forward_scope,
                prefix,
                self.preprocess_logits_for_metrics,
                self.compute_metrics,
                self._group,
                tuple(ignore_keys or ()),
            )

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
