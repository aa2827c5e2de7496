"""Where windows come from: map-style data in poise's order (MapFeed), and loaders or iterables with an
order of their own (LoaderFeed). A feed yields (window, offset of the window after it)."""

from __future__ import annotations

import collections
import itertools
import logging
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from poise import _C, generators
from poise._C import Error

_log = logging.getLogger("poise")


def has_own_order(loader: DataLoader) -> bool:
    """Whether a loader's order is more than torch's shuffle=True or False, which poise replaces."""
    if (
        isinstance(loader.dataset, IterableDataset)
        or type(loader.batch_sampler) is not BatchSampler
    ):
        return True
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return sampler.replacement or sampler.num_samples != len(loader.dataset)
    return type(sampler) is not SequentialSampler


def again(loader: DataLoader, **order: Any) -> DataLoader:
    """The same loader with another order (batch_sampler=, or sampler= with batch_size=None)."""
    kept = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
        )
    }
    if loader.num_workers > 0:
        kept["prefetch_factor"] = loader.prefetch_factor
        kept["multiprocessing_context"] = loader.multiprocessing_context
    # A generator of its own: seeding workers from torch's global one would move the model's dropout.
    return DataLoader(loader.dataset, generator=torch.Generator(), **kept, **order)


class MapFeed:
    """A dataset with a length, in the order of the C++ sampler, window by window."""

    unit = "samples"

    def __init__(
        self,
        loader: DataLoader,
        accumulation: int,
        seed: int,
        shuffle: bool | None,
        ranks: int,
        rank: int,
    ) -> None:
        self.size = len(loader.dataset)
        self.num_workers = loader.num_workers
        self._shuffle = type(loader.sampler) is RandomSampler if shuffle is None else shuffle
        self._seed, self._loader = seed, loader
        self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self._ranks, self._rank = ranks, rank
        split = {} if loader.drop_last else {"ranks": ranks, "rank": rank}
        self._order = _C.Sampler(self.size, seed=seed, shuffle=self._shuffle, **split)
        self._accumulation = accumulation

    @property
    def _window_samples(self) -> int:
        return self._batch_size * self._accumulation * self._ranks

    def set_accumulation(self, batches: int) -> bool:
        """Whether it was another number."""
        changed, self._accumulation = self._accumulation != batches, batches
        return changed

    def identity(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "size": self.size,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def windows(self, epoch: int, offset: int) -> Iterator[tuple[list[Any], int]]:
        loader = again(self._loader, batch_sampler=_Batches(self, epoch, offset))
        loader.generator.manual_seed(self._seed + epoch)  # of the workers' own random streams
        batches = iter(loader)
        for length, after in self.plan(epoch, offset):
            yield list(itertools.islice(batches, len(length))), after

    def plan(self, epoch: int, offset: int) -> Iterator[tuple[list[list[int]], int]]:
        """(index lists of this rank's batches, offset after the window) until the epoch ends."""
        cursor, start = epoch * self.size + offset, epoch * self.size
        while cursor < start + self.size:
            after = self._order.advance(cursor, self._window_samples)
            if not self._drop_last:
                yield self._batches(cursor, self._window_samples), after - start
            elif whole := (after - cursor) // self._batch_size:
                # Whole batches are dealt out: blocks of samples would leave each rank a short one.
                first, end = (whole * r // self._ranks for r in (self._rank, self._rank + 1))
                size = self._batch_size
                samples = (end - first) * size
                lists = self._batches(cursor + first * size, samples) if samples else []
                yield lists, after - start
            cursor = after

    def _batches(self, cursor: int, samples: int) -> list[list[int]]:
        indices, step = self._order.indices(cursor, samples), self._batch_size
        return [indices[i : i + step] for i in range(0, len(indices), step)]


class _Batches:
    """The plan of a feed as a batch sampler."""

    def __init__(self, feed: MapFeed, epoch: int, offset: int) -> None:
        self._feed, self._epoch, self._offset = feed, epoch, offset

    def __iter__(self) -> Iterator[list[int]]:
        for lists, _ in self._feed.plan(self._epoch, self._offset):
            yield from lists


class LoaderFeed:
    """Batches in the order their source gives them; an offset counts batches."""

    unit = "batches"
    size = None

    def __init__(self, batches: Iterable[Any], accumulation: int, seed: int) -> None:
        self._source, self._accumulation, self._seed = batches, accumulation, seed
        self.num_workers = getattr(batches, "num_workers", 0)
        self._said = False
        self._one_pass, self._started = _gives_each_once(batches), False
        self._orders = 0  # that the source's sampler has drawn here

    def identity(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "batch_size": getattr(self._source, "batch_size", None),
        }

    def windows(self, epoch: int, offset: int) -> Iterator[tuple[list[Any], int]]:
        _tell_epoch(self._source, epoch)
        # A generator around it: islice() asks iter() again, and some iterators start anew then.
        batches = (batch for batch in self._from(epoch, offset))
        while window := list(itertools.islice(batches, self._accumulation)):
            offset += len(window)
            yield window, offset

    def set_accumulation(self, batches: int) -> bool:
        """Whether it was another number."""
        changed, self._accumulation = self._accumulation != batches, batches
        return changed

    def _draw_orders(self, epoch: int, sampler: Any) -> None:
        """A sampler with a generator of its own draws on from epoch to epoch: those before a resumed one, too."""
        parts = (sampler, getattr(sampler, "sampler", None))
        own = any(isinstance(getattr(part, "generator", None), torch.Generator) for part in parts)
        for _ in range(epoch - self._orders if own and hasattr(sampler, "__len__") else 0):
            with generators.untouched():
                collections.deque(sampler, maxlen=0)
        self._orders = epoch + 1

    def _from(self, epoch: int, offset: int) -> Iterator[Any]:
        source, seed = self._source, self._seed + epoch
        if isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset):
            # Indices are skipped, samples are not read.
            if source.batch_sampler is None:
                self._draw_orders(epoch, source.sampler)
                order = _Skipping(source.sampler, offset, seed)
                loader = again(source, sampler=order, batch_size=None)
            else:
                self._draw_orders(epoch, source.batch_sampler)
                loader = again(source, batch_sampler=_Skipping(source.batch_sampler, offset, seed))
            loader.generator.manual_seed(seed)  # of the workers' own random streams
            return iter(loader)
        if self._one_pass and self._started:
            raise Error(
                f"[data] a {type(source).__name__} cannot be read a second time (a new epoch, an error "
                "or close() starts anew, and what was read ahead is gone); give a Dataset, a DataLoader, "
                "or an object whose iter() starts from the beginning"
            )
        self._started = True
        with generators.seeded(seed):  # a DataLoader draws a number for its workers
            batches = iter(source)
        if offset == 0:
            return batches
        if not self._said:
            self._said = True
            _log.warning(
                "[data] resuming %s by reading and dropping %d batches: it has no index to seek to",
                type(getattr(source, "dataset", source)).__name__,
                offset,
            )
        with generators.untouched():  # the run that goes on has drawn for them
            for _ in itertools.islice(batches, offset):
                pass
        return batches


class _Skipping:
    """A sampler without its first entries.

    Args:
      seed: of what it draws from no generator of its own (SubsetRandomSampler an order, WeightedRandomSampler
        all indices) when it begins: so a resumed epoch has the order of the unbroken one.
    """

    def __init__(self, sampler: Iterable[Any], skipped: int, seed: int) -> None:
        self._sampler, self._skipped, self._seed = sampler, skipped, seed

    def __iter__(self) -> Iterator[Any]:
        with generators.seeded(self._seed):
            entries = iter(self._sampler)
            first = list(itertools.islice(entries, 1))
        return itertools.islice(itertools.chain(first, entries), self._skipped, None)


def _gives_each_once(source: Any) -> bool:
    """Whether it is one of Python's own iterators (a generator, map, zip), which never start anew.

    An `__iter__` written in Python may return self and start anew all the same.
    """
    return isinstance(source, Iterator) and not isinstance(
        type(source).__iter__, types.FunctionType
    )


def _tell_epoch(source: Any, epoch: int) -> None:
    """set_epoch(), where a loader's sampler or dataset wants to know it (DistributedSampler does)."""
    batch_sampler = getattr(source, "batch_sampler", None)
    for part in (
        source,
        getattr(source, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(source, "dataset", None),
    ):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
