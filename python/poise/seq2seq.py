"""Trainer and arguments of models that write text from text: evaluations may generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poise._C import Error
from poise.labels import LABELS, labels_in
from poise.loss import Loss
from poise.prediction import PredictionOutput
from poise.trainer import Trainer
from poise.training_arguments import TrainingArguments


class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments and what is generated in evaluations, as in transformers.

    Args:
      predict_with_generate: predictions are generated tokens instead of logits.
      generation_max_length, generation_num_beams: of generate(); None: the model's own.
      generation_config: a transformers.GenerationConfig for generate().
      sortish_sampler: refused: samples come in a random order, or as they are.
    """

    def __init__(
        self,
        output_dir: str | None = None,
        *,
        predict_with_generate: bool = False,
        generation_max_length: int | None = None,
        generation_num_beams: int | None = None,
        generation_config: Any = None,
        sortish_sampler: bool = False,
        **given: Any,
    ) -> None:
        if sortish_sampler:
            raise Error(
                "[trainer] sortish_sampler: samples come in a random order, or as they are; leave it out"
            )
        self.predict_with_generate = predict_with_generate
        self.generation_max_length = generation_max_length
        self.generation_num_beams = generation_num_beams
        self.generation_config = generation_config
        super().__init__(output_dir, **given)


class Seq2SeqTrainer(Trainer):
    """A Trainer whose evaluate() and predict() may generate: both take arguments of generate() too."""

    _generate_with: Mapping[str, Any] = {}

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generate_with: Any,
    ) -> dict[str, float]:
        self._generate_with = generate_with
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generate_with: Any,
    ) -> PredictionOutput:
        self._generate_with = generate_with
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _outputs_of(self, batch: Any, with_loss: bool) -> tuple[Loss | None, Any, Any]:
        if not getattr(self.args, "predict_with_generate", False):
            return super()._outputs_of(batch, with_loss)
        loss = self._loss(batch) if labels_in(batch, self.label_names) is not None else None
        dropped = {*LABELS, *self.label_names, "decoder_input_ids"}
        inputs = {n: v for n, v in batch.items() if n not in dropped}
        with self._whole_model():  # ranks generate for different lengths
            tokens = self.model.generate(**inputs, **self._arguments())
        return loss, tokens, labels_in(batch, self.label_names)

    def _arguments(self) -> dict[str, Any]:
        """Of generate(): the call's, else the Trainer's."""
        given = {k: v for k, v in self._generate_with.items() if v is not None}
        of_args = {
            "max_length": self.args.generation_max_length,
            "num_beams": self.args.generation_num_beams,
            "generation_config": self.args.generation_config,
        }
        if "max_new_tokens" in given:
            del of_args["max_length"]
        return {k: v for k, v in of_args.items() if v is not None} | given
