"""A loss as the planner runs it: one number, and whether it said what it is a sum or a mean over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from poise._C import Error
from poise.loss import Loss, as_loss
from poise.model_call import call_model
from poise.two_part_loss import whole


def scalar(loss: Loss) -> torch.Tensor:
    """All of a loss as one number to run backward of; its weight in a window is not in it."""
    loss = whole(loss) if loss.terms else loss
    return loss.value if loss.kind == "mean" else loss.value.sum()


class PlannedLoss:
    """The scalar loss of a batch.

    Args:
      model: that is planned.
      loss_fn: gives what a loss function may return (poise.loss); None: what the model returns is the
        loss, or has it, or is a value of each sample, of which the mean is taken.

    Attributes:
      came_counted: the last loss said what it is a sum or a mean over.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any], Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.came_counted = False

    def __call__(self, batch: Any) -> torch.Tensor:
        if self.loss_fn is None:
            return self._returned(call_model(self.model, batch))
        loss = as_loss(self.loss_fn(batch))
        self.came_counted = loss.kind != "mean" or loss.count is not None
        return scalar(loss)

    def of_copy(self) -> PlannedLoss:
        """The same of a copy of the model.

        Raises:
          Error: for a loss_fn, which runs the model itself.
        """
        if self.loss_fn is not None:
            raise Error(
                "[plan] the model cannot run without data and a loss_fn of its own cannot be given a "
                "copy of it; give a model that returns its loss, or plan with poise.Trainer, which "
                "measures the model itself"
            )
        return PlannedLoss(copy.deepcopy(self.model), None)

    def _returned(self, output: Any) -> torch.Tensor:
        found, count = getattr(output, "loss", None), None
        if found is None and isinstance(output, Mapping):
            found, count = output.get("loss"), output.get("n", output.get("num_tokens"))
        if found is None:
            found = next((t for t in tree_leaves(output) if isinstance(t, torch.Tensor)), None)
            if found is None:
                raise Error(
                    f"[plan] {type(self.model).__name__} returned {type(output).__name__}, which has no "
                    "tensor and no .loss; return a loss, or give loss_fn"
                )
            if isinstance(output, tuple) and len(output) == 2 and _is_count(output[1]):
                count = output[1]
        self.came_counted = count is not None or found.dim() > 0
        return found.float().mean()


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
