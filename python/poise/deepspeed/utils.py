"""What scripts import from `deepspeed.utils`: a logger, and a loader that begins again at its end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from poise import comm

__all__ = ["RepeatingLoader", "log_dist", "logger"]


def _made() -> logging.Logger:
    """As DeepSpeed has it: warnings and worse go to standard output, whatever the root logger does."""
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.WARNING)
        made.propagate = False
    return made


logger = _made()


def log_dist(message: Any, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks; on all where ranks holds -1, or where there is one process alone."""
    chosen = set(ranks or ())
    if not comm.is_initialized() or chosen & {-1, comm.get_rank()}:
        logger.log(level, "[Rank %d] %s", comm.get_rank(), message)


class RepeatingLoader:
    """Its batches over and over."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
