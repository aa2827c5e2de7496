"""Label smoothing as a Trainer's compute_loss_func (Szegedy et al. 2016, arXiv:1512.00567)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from poise._batch import count_targets
from poise.loss import Loss

IGNORED = -100


class LabelSmoothing:
    """(1 - factor) of the cross-entropy with the labels, factor of that with all classes alike.

    Args:
      factor: in (0, 1).
      shifted: whether position t is compared with label t + 1.
    """

    def __init__(self, factor: float, shifted: bool) -> None:
        self._factor, self._shifted = factor, shifted

    def __call__(self, outputs: Any, labels: torch.Tensor) -> Loss:
        """Mean over the labels that count, and their number."""
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if self._shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        logs = F.log_softmax(logits.float().flatten(0, -2), dim=-1)
        labels = labels.flatten()
        counted = labels != IGNORED
        nll = F.nll_loss(logs, labels, ignore_index=IGNORED, reduction="sum")
        alike = -(logs.mean(dim=-1) * counted).sum()
        total = (1 - self._factor) * nll + self._factor * alike
        return Loss(total, count_targets(labels), kind="sum")


class LabelSmoother:
    """The same as transformers' object of that name: called with whether labels are to be shifted, it gives
    the mean."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(
        self, outputs: Any, labels: torch.Tensor, shift_labels: bool = False, **_: Any
    ) -> torch.Tensor:
        loss = LabelSmoothing(self._factor, shift_labels)(outputs, labels)
        return loss.value / loss.count
