"""The mean loss of a model over a dataset, by counted tokens: the same for any batch size."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from poise._C import Error
from poise.loss import Loss


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[Any], Loss],
    scope: Callable[[], contextlib.AbstractContextManager],
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
    training = [module for module in model.modules() if module.training]
    begin = time.perf_counter()
    loss_sum = tokens = 0.0
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                with scope():
                    loss = loss_fn(batch)
                batch_sum, count = _sum_of(loss)
                loss_sum += batch_sum
                tokens += count
    finally:
        for module in training:
            module.training = True
    if tokens == 0:
        raise Error(
            "[trainer] the evaluation counted no token; its data is empty, or every label is masked"
        )
    seconds = time.perf_counter() - begin
    return {
        f"{prefix}_loss": loss_sum / tokens,
        f"{prefix}_tokens": tokens,
        f"{prefix}_runtime": seconds,
        f"{prefix}_tokens_per_second": tokens / seconds,
    }


def _sum_of(loss: Loss) -> tuple[float, float]:
    """Sum and count of a batch; a fully masked batch has a mean of NaN and counts for nothing."""
    count = loss.value.numel() if loss.kind == "per_token" and loss.count is None else loss.count
    count = 1.0 if count is None else float(count)
    if count == 0:
        return 0.0, 0.0
    value = float(loss.value.double().sum())
    return (value * count if loss.kind == "mean" else value), count
