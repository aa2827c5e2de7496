"""Losses of pretraining models that add two means over different counts: masked words and pairs of
sentences (BertForPreTraining and its like). Weighed by the words alone, the second part would count
more in micro-batches that have many masked words."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from poise.labels import LABELS
from poise.loss import Loss, Term

# Labels of the second part, and the model's output that it is made from.
SECOND = {
    "next_sentence_label": "seq_relationship_logits",
    "sentence_order_label": "sop_logits",
}


class TwoPartLoss:
    """Takes such a model's loss apart. The second part is computed again, and what is left is the first.

    Args:
      label: of the second part.
    """

    def __init__(self, label: str) -> None:
        self._label, self._logits = label, SECOND[label]

    @classmethod
    def of(cls, model: nn.Module) -> TwoPartLoss | None:
        """None where the model's loss is no such sum."""
        model = getattr(model, "_orig_mod", model)
        if not type(model).__name__.endswith("ForPreTraining"):
            return None
        names = inspect.signature(model.forward).parameters
        label = next((name for name in SECOND if name in names and "labels" in names), None)
        return None if label is None else cls(label)

    def split(self, loss: Loss, outputs: Any, batch: Any) -> Loss:
        """The loss with its second part as a term; a batch without labels for it stays as it is."""
        labels, logits = self._labels(batch), getattr(outputs, self._logits, None)
        if labels is None or logits is None:
            return loss
        second = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        count = (labels != -100).sum()
        return Loss(loss.value - second, loss.count, loss.kind, (Term(second, count),))

    def count(self, batch: Any) -> int | None:
        """Pairs of sentences that count; None: the batch has no labels for them."""
        labels = self._labels(batch)
        return None if labels is None else int((labels != -100).sum())

    def _labels(self, batch: Any) -> torch.Tensor | None:
        if not isinstance(batch, Mapping) or not any(name in batch for name in LABELS):
            return None  # the model makes no loss
        return batch.get(self._label)


def whole(loss: Loss) -> Loss:
    """The sum of its parts, weighed by the count of the first."""
    value = loss.value + sum(term.weight * term.value for term in loss.terms)
    return Loss(value, loss.count, loss.kind)
