"""A loader that knows which of its batches is the last one, so that a window ends with its epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class MarkedLoader:
    """Gives the batches of a loader, unchanged.

    Data without a length is read one batch ahead.

    Attributes:
      loader: what is read.
      batch: the one given last.
      at_end: whether that was the last one.
      calls: backward calls with this batch; usual_calls: with the one before it. A loop may cut its
        batches into parts.
    """

    def __init__(self, loader: Iterable[Any], on_start: Callable[[], None] | None = None) -> None:
        self.loader = loader
        self.batch: Any = None
        self.at_end = False
        self.calls, self.usual_calls = 0, 1
        self._on_start = on_start

    def __iter__(self) -> Iterator[Any]:
        if self._on_start is not None:
            self._on_start()
        self.at_end = False
        try:
            last = len(self.loader)
        except TypeError:  # no length, or one that its dataset lacks
            return self._read_ahead()
        return self._counted(last)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _counted(self, last: int) -> Iterator[Any]:
        for number, batch in enumerate(self.loader, 1):
            self._give(batch, number == last)
            yield batch

    def _read_ahead(self) -> Iterator[Any]:
        batches = iter(self.loader)
        following = next(batches, batches)  # the iterator itself stands for "none left"
        while following is not batches:
            batch, following = following, next(batches, batches)
            self._give(batch, following is batches)
            yield batch

    def _give(self, batch: Any, at_end: bool) -> None:
        self.batch, self.at_end = batch, at_end
        self.usual_calls = self.calls or self.usual_calls
        self.calls = 0
