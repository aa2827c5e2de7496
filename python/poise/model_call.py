"""A Trainer's batch goes through the model and comes back as a weighed loss."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from poise import wrong_batch
from poise._C import Error
from poise.data import count_targets
from poise.labels import counted_in, labels_in, names_of, without_labels
from poise.loss import Count, Loss, as_loss
from poise.two_part_loss import TwoPartLoss

logger = logging.getLogger("poise")


class ModelCall:
    """Calls the model, finds the loss in what it returns, and counts what the loss is a mean over.

    Args:
      model: called with **batch, *batch or batch, by the type of the batch.
      compute_loss_func: gets (outputs, labels); returns what a loss function may return.
      shift_labels: whether the model compares position t with label t + 1, so that the first label
        of each row counts for nothing; None: causal language models by their class name, and what
        wraps one.
      label_names: of a batch's entries that are labels; None: forward's arguments say it
        (poise.labels).
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss_func: Callable[..., Any] | None = None,
        shift_labels: bool | None = None,
        label_names: Sequence[str] | None = None,
    ) -> None:
        self._model = model
        self.label_names = tuple(names_of(model) if label_names is None else label_names)
        self._compute_loss = compute_loss_func
        self._parts = None if compute_loss_func is not None else TwoPartLoss.of(model)
        self._takes_items = _takes(compute_loss_func, "num_items_in_batch")
        self.came_counted = False  # the last loss said what it is a sum or a mean over
        self.shift_labels = _shifts(model) if shift_labels is None else shift_labels

    def __call__(self, batch: Any) -> Loss:
        loss, outputs = self.loss_and_outputs(batch)
        return self._weighed(loss, outputs, batch)

    @property
    def models_loss(self) -> bool:
        """Whether the loss is what the model returns, and not made of its outputs."""
        return self._compute_loss is None

    @property
    def has_parts(self) -> bool:
        """Whether its losses have two counts."""
        return self._parts is not None

    def window_counts(self, window: Sequence[Any]) -> list[int]:
        """Of losses with two counts: this rank's counts of a window; empty where there is one."""
        if self._parts is None:
            return []
        seconds = [self._parts.count(batch) for batch in window]
        if None in seconds:
            return []
        return [sum(int(self.count(batch)) for batch in window), sum(seconds)]

    def predict(self, batch: Any, with_loss: bool = False) -> tuple[Loss | None, Any, Any]:
        """(loss, outputs without it, labels) of a batch.

        Args:
          batch: without labels it gives (None, outputs, None),
          with_loss: unless this is on.
        """
        labels = labels_in(batch, self.label_names)
        if labels is None and not with_loss:
            return None, call_model(self._model, batch), None
        loss, outputs = self.loss_and_outputs(batch)
        all_outputs = outputs
        if self._compute_loss is None and isinstance(outputs, (tuple, list)):
            outputs = outputs[1:]  # the first one is the loss
        return self._weighed(loss, all_outputs, batch), outputs, labels

    def count(self, batch: Any) -> Count:
        """Labels that count, without waiting for the device; without labels: samples."""
        labels = counted_in(batch, self.label_names)
        if labels is None or labels.is_floating_point() or labels.dim() == 0:
            return _samples(batch)
        return count_targets(labels, shifted=self.shift_labels and labels.dim() > 1)

    def _weighed(self, loss: Loss, outputs: Any, batch: Any) -> Loss:
        loss = self._counted(loss, batch)
        return loss if self._parts is None else self._parts.split(loss, outputs, batch)

    def _counted(self, loss: Loss, batch: Any) -> Loss:
        counted = loss.count is not None or loss.kind != "mean"
        self.came_counted = counted or self._takes_items  # a sum over those that it is given
        if not counted:
            loss.count = self.count(batch)
        return loss

    def loss_and_outputs(self, batch: Any) -> tuple[Loss, Any]:
        """The loss, and all that the model returned."""
        with wrong_batch.explained(self._model, batch, self.label_names):
            return self._loss_and_outputs(batch)

    def _loss_and_outputs(self, batch: Any) -> tuple[Loss, Any]:
        if self._compute_loss is None:
            outputs = call_model(self._model, batch)
            if labels_in(batch, self.label_names) is None and _has_no_loss(outputs):
                raise Error(
                    f"[trainer] the batch has {_keys(batch)} but no labels, and the model returned "
                    "no loss; let the dataset or data_collator give labels, or give "
                    "compute_loss_func"
                )
            return _loss_in(outputs), outputs
        outputs = call_model(self._model, without_labels(batch, self.label_names))
        # With the micro-batch's own number functions written for transformers make a mean; the
        # engine does the rest.
        extra = {"num_items_in_batch": self.count(batch)} if self._takes_items else {}
        labels = labels_in(batch, self.label_names)
        return as_loss(self._compute_loss(outputs, labels, **extra)), outputs


def call_model(model: nn.Module, batch: Any) -> Any:
    """The model of **batch, *batch or batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _loss_in(outputs: Any) -> Loss:
    """Models return (loss, logits, ...) too, which a loss function may not."""
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], torch.Tensor):
        if outputs[0].numel() == 1 and not (len(outputs) == 2 and _is_number(outputs[1])):
            return Loss(outputs[0])
        outputs = tuple(outputs)
    if isinstance(outputs, torch.Tensor) and outputs.numel() != 1:
        raise Error(
            f"[trainer] the model returned a tensor of shape {tuple(outputs.shape)}, not a loss; "
            "return the loss from forward, or give compute_loss_func"
        )
    return as_loss(outputs)


def _has_no_loss(outputs: Any) -> bool:
    """Whether it is an output with fields, none of them a loss."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss") is None
    return hasattr(outputs, "loss") and outputs.loss is None


def _keys(batch: Any) -> str:
    return ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _samples(batch: Any) -> Count:
    values = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, torch.Tensor) or not isinstance(values, Iterable):
        values = [batch]
    sizes = (v.shape[0] for v in values if isinstance(v, torch.Tensor) and v.dim() > 0)
    return next(sizes, None)


def _shifts(model: nn.Module) -> bool:
    model = getattr(model, "_orig_mod", model)
    if _is_causal(model):
        return True
    # A decoder within a pair gets labels that its encoder-decoder has shifted.
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    inner = next((m for m in model.modules() if m is not model and _is_causal(m)), None)
    if inner is not None:
        logger.info(
            "[trainer] %s holds %s: the first label of each row is taken to count for nothing, as "
            "there; shift_labels=False says otherwise",
            type(model).__name__,
            type(inner).__name__,
        )
    return inner is not None


def _is_causal(model: nn.Module) -> bool:
    name = type(model).__name__
    if "ForConditionalGeneration" in name:  # text after an image, or by a decoder of its own
        return not getattr(getattr(model, "config", None), "is_encoder_decoder", True)
    # Not a head of a masked model, as AlbertMLMHead or RobertaLMHead.
    return "CausalLM" in name or "LMHeadModel" in name


def _takes(function: Callable[..., Any] | None, name: str) -> bool:
    if function is None:
        return False
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)
