"""Trainer and arguments of models that write text from text: evaluations may generate."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poise import command_line
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
      generation_config: a transformers.GenerationConfig for generate(), or the path of a saved one; it
        becomes the model's.
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
        self.predict_with_generate = predict_with_generate
        self.generation_max_length = generation_max_length
        self.generation_num_beams = generation_num_beams
        self.generation_config = generation_config
        self.sortish_sampler = sortish_sampler
        super().__init__(output_dir, **given)

    def _check(self) -> None:
        super()._check()
        if self.sortish_sampler:
            raise Error(
                "[trainer] sortish_sampler: samples come in a random order, or as they are; leave it out"
            )


command_line.describe(
    Seq2SeqTrainingArguments,
    {
        "predict_with_generate": (bool, False),
        "generation_max_length": (int | None, None),
        "generation_num_beams": (int | None, None),
        "generation_config": (str | None, None),
        "sortish_sampler": (bool, False),
    },
)

USUAL_LENGTH = 20  # of generate(), where the model's generation_config has no max_length


class Seq2SeqTrainer(Trainer):
    """A Trainer whose evaluate() and predict() may generate: both take arguments of generate() too.

    Generated tokens and labels are padded with the pad token to the max_length of the model's
    generation_config, as by transformers: predictions of several batches, and of several ranks, have one
    shape. What is longer already stays, and -100 makes batches as long as the longest.
    """

    _generate_with: Mapping[str, Any] = {}  # of the evaluation that is going on

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generate_with: Any,
    ) -> dict[str, float]:
        with self._generating(generate_with):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generate_with: Any,
    ) -> PredictionOutput:
        with self._generating(generate_with):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @contextlib.contextmanager
    def _generating(self, generate_with: Mapping[str, Any]) -> Iterator[None]:
        """Of several datasets each is evaluated by a call without arguments within the one that has them."""
        before = self._generate_with
        self._generate_with = {**before, **generate_with}
        try:
            yield
        finally:
            self._generate_with = before

    def _take(self, model: nn.Module) -> None:
        super()._take(model)
        given = getattr(self.args, "generation_config", None)
        if given is not None:
            self.model.generation_config = _loaded(given)

    def _outputs_of(self, batch: Any, with_loss: bool) -> tuple[Loss | None, Any, Any]:
        if not getattr(self.args, "predict_with_generate", False):
            return super()._outputs_of(batch, with_loss)
        labels = labels_in(batch, self.label_names)
        loss = None if labels is None else self._loss(batch)
        with self._whole_model():  # ranks generate for different lengths
            tokens = self.model.generate(**self._inputs(batch, labels), **self._arguments())
        length = self._padded_length
        tokens = self._pad_tensors_to_max_len(tokens, length)
        return (
            loss,
            tokens,
            None if labels is None else self._pad_tensors_to_max_len(labels, length),
        )

    def _inputs(self, batch: Mapping[str, Any], labels: Any) -> dict[str, Any]:
        """Of generate(): a decoder's inputs that were made of the labels would tell it the answer."""
        dropped = {*LABELS, *self.label_names}
        begins = batch.get("decoder_input_ids")
        if labels is not None and begins is not None and begins.shape == labels.shape:
            dropped |= {"decoder_input_ids", "decoder_attention_mask"}
        return {name: value for name, value in batch.items() if name not in dropped}

    def _arguments(self) -> dict[str, Any]:
        """Of generate(): the call's, else the Trainer's, which leave the rest to the model's. A length that
        nobody gives is the usual one in every batch; transformers 5 gives the first one a token more."""
        given = {k: v for k, v in self._generate_with.items() if v is not None}
        of_args = {
            "max_length": self.args.generation_max_length,
            "num_beams": self.args.generation_num_beams,
        }
        config = self.model.generation_config
        of_model = (getattr(config, name, None) for name in ("max_length", "max_new_tokens"))
        if "max_new_tokens" in given:
            del of_args["max_length"]
        elif of_args["max_length"] is None and all(length is None for length in of_model):
            of_args["max_length"] = USUAL_LENGTH
        return {k: v for k, v in of_args.items() if v is not None} | given

    @property
    def _padded_length(self) -> tuple[int, int]:
        """Tokens of a row, and of one that is as long as that already."""
        config = self.model.generation_config
        longest = getattr(config, "max_length", None) or USUAL_LENGTH
        return longest, (getattr(config, "max_new_tokens", None) or 0) + 1

    def _pad_tensors_to_max_len(
        self, tensor: torch.Tensor, max_length: int | tuple[int, int]
    ) -> torch.Tensor:
        """Rows of the first length that is more than they have; else they stay."""
        lengths = max_length if isinstance(max_length, tuple) else (max_length,)
        length = next((n for n in lengths if n > tensor.shape[-1]), tensor.shape[-1])
        if length == tensor.shape[-1]:
            return tensor
        padded = tensor.new_full((tensor.shape[0], length), self._pad_token())
        padded[:, : tensor.shape[-1]] = tensor
        return padded

    def _pad_token(self) -> int:
        """Of the tokenizer, which may do with its end of text; without one, of the model's config."""
        owner = self.processing_class
        names = ("pad_token_id", "eos_token_id")
        if not hasattr(owner, "pad_token_id"):
            owner, names = getattr(self.model, "config", None), ("pad_token_id",)
        found = (getattr(owner, name, None) for name in names)
        token = next((one for one in found if one is not None), None)
        if token is None:
            raise Error(
                "[trainer] predict_with_generate pads what was generated, and there is no pad token; set "
                "pad_token_id in the model's config, or give processing_class a pad_token"
            )
        return token


def _loaded(given: Any) -> Any:
    """A transformers.GenerationConfig: a copy, or that of a file or a folder."""
    if not isinstance(given, (str, Path)):
        return copy.deepcopy(given)
    from transformers import GenerationConfig

    path = Path(given)
    if not path.exists():
        raise Error(
            f"[trainer] generation_config {given}: there is no such file or folder; give the path of a saved "
            "one, or a transformers.GenerationConfig"
        )
    if path.is_file():
        return GenerationConfig.from_pretrained(path.parent, path.name)
    return GenerationConfig.from_pretrained(given)
