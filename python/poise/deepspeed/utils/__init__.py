"""What scripts import from `deepspeed.utils`: a logger, a loader that begins again at its end, whole
values of sharded parameters."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from poise import comm
from poise.deepspeed.utils.whole_values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]


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


def __getattr__(name: str) -> Any:
    why = "; docs/deepspeed.md says what there is"
    if name.startswith("safe_") and "_local_" in name:
        why = f": shards are cut poise's own way; {name.replace('_local_', '_full_')} has the whole"
    raise AttributeError(f"poise.deepspeed.utils has no {name}{why}")
