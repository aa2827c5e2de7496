"""Which batches of an evaluation this rank runs, and the results of all ranks put in order again.

Batch i is run by rank i % ranks. A forward may be a collective (zero.stage 3), so all ranks run equally
many: one that has none left runs a batch again, and what comes of it is dropped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from poise._C import Error, Group
from poise._feeds import again, has_own_order


@dataclasses.dataclass(frozen=True)
class Uncounted:
    """A batch that is run for the sake of the other ranks alone."""

    batch: Any


def share_of(loader: DataLoader, group: Group) -> Iterable[Any]:
    """This rank's batches, some of them perhaps Uncounted.

    Of a loader with an order of its own every rank reads all batches and runs its share; where its
    sampler splits over ranks already (it has num_replicas), all of them.
    """
    if group.size == 1:
        return loader
    if not has_own_order(loader):
        return _by_index(loader, group)
    return _own(loader, group) if splits_itself(loader) else _every_nth(loader, group)


def splits_itself(loader: DataLoader) -> bool:
    """Whether a loader's sampler gives each rank samples of its own, as DistributedSampler does."""
    samplers = (
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    )
    return any(getattr(sampler, "num_replicas", 1) > 1 for sampler in samplers)


def in_order(rows_of_ranks: list[list[Any]]) -> list[Any]:
    """Results of all ranks in the order of their batches."""
    missing = object()
    rounds = itertools.zip_longest(*rows_of_ranks, fillvalue=missing)
    return [row for one_round in rounds for row in one_round if row is not missing]


def _by_index(loader: DataLoader, group: Group) -> Iterator[Any]:
    count, size, step = len(loader), len(loader.dataset), loader.batch_size
    mine = [
        i * group.size + group.rank for i in range(math.ceil(count / group.size) if count else 0)
    ]
    counted = [number < count for number in mine]
    starts = [number * step if counts else 0 for number, counts in zip(mine, counted, strict=True)]
    lists = [list(range(start, min(start + step, size))) for start in starts]
    for batch, counts in zip(again(loader, batch_sampler=lists), counted, strict=True):
        yield batch if counts else Uncounted(batch)


def _every_nth(loader: DataLoader, group: Group) -> Iterator[Any]:
    number, batch = -1, None
    for number, batch in enumerate(loader):
        if number % group.size == group.rank:
            yield batch
    if 0 < (number + 1) % group.size <= group.rank:
        yield Uncounted(batch)


def _own(loader: DataLoader, group: Group) -> Iterator[Any]:
    lengths = [int(text) for text in group.all_gather_text(str(len(loader)), "batches")]
    if min(lengths) == 0 < max(lengths):
        raise Error(
            f"[trainer] the sampler of an evaluation gives rank {lengths.index(0)} no batch; give "
            "every rank one or more, or a dataset instead of a loader"
        )
    batch = None
    for batch in loader:
        yield batch
    for _ in range(max(lengths) - len(loader)):
        yield Uncounted(batch)
