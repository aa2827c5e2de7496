"""The mean loss of a model over a dataset, by counted tokens: the same for any batch size."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from poise._batch import samples_in
from poise._C import Error, Group
from poise.eval_share import Uncounted, in_order
from poise.loss import Loss

Scope = Callable[[], contextlib.AbstractContextManager]


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[Any], Loss],
    scope: Scope,
    prefix: str = "eval",
    group: Group | None = None,
) -> dict[str, float]:
    """Runs the batches without gradients, in eval mode, and puts the model's modes back.

    Args:
      model: whose modes are switched.
      batches: what to run; of several ranks each has its share (poise.eval_share).
      loss_fn: the loss of a batch, with its count.
      scope: makes the context of one forward (precision).
      prefix: of the metrics' names.
      group: the ranks that share the batches; all get the mean over all of them.
    """
    mean = MeanLoss()
    with eval_mode(model):
        for batch in batches:
            counts = not isinstance(batch, Uncounted)
            with scope():
                loss = loss_fn(batch if counts else batch.batch)
            if counts:
                mean.add(loss)
    if group is not None and group.size > 1:
        texts = group.all_gather_text(json.dumps(mean.rows), "losses of the evaluation")
        mean.rows = in_order([json.loads(text) for text in texts])
    return mean.metrics(prefix)


class Passed:
    """Batches on their way into an evaluation, counted; those that are run for other ranks alone are not.

    Attributes:
      samples, batches: of this rank, so far.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self.samples = self.batches = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._source:
            if not isinstance(batch, Uncounted):
                self.samples += samples_in(batch)
                self.batches += 1
            yield batch


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


def batches_read_at_once(device: torch.device) -> int:
    return 256 if device.type == "cuda" else 1


class MeanLoss:
    """The mean over the counted tokens of many batches, and how fast they went.

    What is on a GPU stays there for some batches, so that the host does not wait for each of them.
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._rows: list[tuple[float, ...]] = []
        self._unread: list[list[_Sum]] = []

    @property
    def rows(self) -> list[tuple[float, ...]]:
        """Of each batch the sum of its losses and its count, and those of further terms."""
        self._read()
        return self._rows

    @rows.setter
    def rows(self, rows: list[tuple[float, ...]]) -> None:
        self._rows, self._unread = rows, []

    def add(self, loss: Loss) -> None:
        """A fully masked batch has a mean of NaN and counts for nothing."""
        count = (
            loss.value.numel() if loss.kind == "per_token" and loss.count is None else loss.count
        )
        count = 1.0 if count is None else count
        whole = _Sum(loss.value.double().sum(), count, 1.0, is_mean=loss.kind == "mean")
        terms = [  # means with counts of their own
            _Sum(term.value.double().reshape(()), term.count, term.weight, is_mean=True)
            for term in loss.terms
        ]
        self._unread.append([whole, *terms])
        if len(self._unread) >= batches_read_at_once(loss.value.device):
            self._read()

    def _read(self) -> None:
        sums = [one for batch in self._unread for one in batch]
        values = iter(_numbers([one.value for one in sums]))
        counts = iter(_numbers([one.count for one in sums]))
        for batch in self._unread:
            row: tuple[float, ...] = ()
            for one in batch:
                value, count = next(values), next(counts)
                row += one.of(value, count) if count > 0 else (0.0, 0.0)
            self._rows.append(row)
        self._unread = []

    def metrics(self, prefix: str) -> dict[str, float]:
        """By name; raises Error where nothing was counted."""
        sums = [0.0] * max((len(row) for row in self.rows), default=2)
        for row in self.rows:
            for i, value in enumerate(row):
                sums[i] += value
        tokens = sums[1]
        if tokens == 0:
            raise Error(
                "[trainer] the evaluation counted no token; its data is empty, or every label is "
                "masked"
            )
        seconds = self.seconds()
        return {
            f"{prefix}_loss": sum(a / n for a, n in zip(sums[::2], sums[1::2], strict=True) if n),
            f"{prefix}_tokens": tokens,
            f"{prefix}_runtime": seconds,
            f"{prefix}_tokens_per_second": tokens / seconds,
        }

    def seconds(self) -> float:
        return time.perf_counter() - self._begin


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A loss or a term of it, not read yet."""

    value: torch.Tensor
    count: Any
    weight: float
    is_mean: bool

    def of(self, value: float, count: float) -> tuple[float, float]:
        return (value * self.weight * count if self.is_mean else value), count


def _numbers(given: list[Any]) -> list[float]:
    """Of numbers and tensors of one; each device is waited for once."""
    on = {value.device for value in given if isinstance(value, torch.Tensor)}
    read: dict[int, float] = {}
    for device in on:
        there = [
            i for i, v in enumerate(given) if isinstance(v, torch.Tensor) and v.device == device
        ]
        found = torch.stack([given[i].detach().double().reshape(()) for i in there]).tolist()
        read |= dict(zip(there, found, strict=True))
    return [read[i] if i in read else float(value) for i, value in enumerate(given)]
