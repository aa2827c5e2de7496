"""The mean loss of a model over a dataset, by counted tokens: the same for any batch size."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from poise._C import Error
from poise.loss import Loss

Scope = Callable[[], contextlib.AbstractContextManager]


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[Any], Loss],
    scope: Scope,
    prefix: str = "eval",
) -> dict[str, float]:
    """Runs the batches without gradients, in eval mode, and puts the model's modes back.

    Args:
      model: whose modes are switched.
      batches: what to run.
      loss_fn: the loss of a batch, with its count.
      scope: makes the context of one forward (precision).
      prefix: of the metrics' names.
    """
    mean = MeanLoss()
    with eval_mode(model):
        for batch in batches:
            with scope():
                loss = loss_fn(batch)
            mean.add(loss)
    return mean.metrics(prefix)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No gradients, all modules in eval mode; afterwards each has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class MeanLoss:
    """The mean over the counted tokens of many batches, and how fast they went."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._sum = self._tokens = 0.0

    def add(self, loss: Loss) -> None:
        """A fully masked batch has a mean of NaN and counts for nothing."""
        count = (
            loss.value.numel() if loss.kind == "per_token" and loss.count is None else loss.count
        )
        count = 1.0 if count is None else float(count)
        if count == 0:
            return
        value = float(loss.value.double().sum())
        self._sum += value * count if loss.kind == "mean" else value
        self._tokens += count

    def metrics(self, prefix: str) -> dict[str, float]:
        """By name; raises Error where nothing was counted."""
        if self._tokens == 0:
            raise Error(
                "[trainer] the evaluation counted no token; its data is empty, or every label is "
                "masked"
            )
        seconds = self.seconds()
        return {
            f"{prefix}_loss": self._sum / self._tokens,
            f"{prefix}_tokens": self._tokens,
            f"{prefix}_runtime": seconds,
            f"{prefix}_tokens_per_second": self._tokens / seconds,
        }

    def seconds(self) -> float:
        return time.perf_counter() - self._begin
