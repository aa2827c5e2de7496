"""Batches in a resumable order: the C++ permutation as a torch Sampler, byte files as a torch Dataset,
and windows (the batches of one update) of any dataset or loader, read ahead and resumable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Sampler as TorchSampler

from poise import _C
from poise._batch import cast_inputs, count_targets
from poise._C import Error
from poise._corpus import ByteCorpus, byte_corpus
from poise._feeds import LoaderFeed, MapFeed, has_own_order
from poise._read_ahead import ReadAhead

__all__ = [
    "ByteCorpus",
    "ResumableSampler",
    "WindowIterator",
    "byte_corpus",
    "cast_inputs",
    "count_targets",
]

_CHUNK = 4096  # indices asked from C++ at once


class ResumableSampler(TorchSampler):
    """The samples of an epoch in the order of poise's permutation, from any global sample index on.

    The order depends on (seed, epoch, size) alone, so resuming reads nothing that is skipped. A
    DataLoader draws indices before their batches are used; whoever uses them says where to resume:
    `seek(samples used so far)`. Each iteration starts at `cursor` and ends with its epoch; a
    finished one moves `cursor` to the next epoch, so that a plain loop over epochs works.

    Args:
        size: Number of samples, or something with a length.
        seed: Chooses the order.
        shuffle: False: 0, 1, 2, ...
    """

    def __init__(self, size: Any, *, seed: int = 42, shuffle: bool = True) -> None:
        self._size = size if isinstance(size, int) else len(size)
        self._seed, self._shuffle = seed, shuffle
        self._order = _C.Sampler(self._size, seed=seed, shuffle=shuffle)
        self.cursor = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        cursor = self.cursor
        end = (cursor // self._size + 1) * self._size
        while cursor < end:
            indices = self._order.indices(cursor, _CHUNK)
            yield from indices
            cursor += len(indices)
        self.cursor = max(self.cursor, end)

    def seek(self, cursor: int) -> None:
        """The next iteration starts at this global sample index."""
        if cursor < 0:
            raise Error(f"[data] cursor is {cursor}; a global sample index is 0 or more")
        self.cursor = cursor

    def set_epoch(self, epoch: int) -> None:
        """The next iteration starts with this epoch's first sample."""
        self.seek(epoch * self._size)

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same(state, self._identity())
        self.seek(state["cursor"])

    def _identity(self) -> dict[str, Any]:
        return {"size": self._size, "seed": self._seed, "shuffle": self._shuffle}


def check_same(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises Error where a saved position belongs to another order of data."""
    for key, value in mine.items():
        if state.get(key) != value:
            raise Error(
                f"[data] saved position is of other data: {key} was {state.get(key)!r}, is {value!r}; "
                "resume with the same dataset, seed and batch sizes"
            )


class WindowIterator:
    """Windows of batches, one per update, the last of an epoch shorter; resumable at any window.

    A map-style dataset (or a DataLoader over one with torch's own samplers) is read in the order of
    ResumableSampler, and resuming touches no skipped sample. A DataLoader with a sampler of its own
    keeps its order and resumes by skipping indices. Iterable data is resumed by reading and dropping
    batches, which is said in the log; a generator can be read once, and asking it again is an error.

    Args:
        data: Dataset or sequence of samples, DataLoader, or any other iterable of batches.
        micro_batch_size: Samples of a batch, for datasets (1 unless given; loaders have their own).
        accumulation: Batches of one window.
        seed, shuffle: Order of map-style data; shuffle None: True for datasets, as built for loaders.
        epochs: How many in all; None: no end.
        prefetch: Windows read ahead on a thread. None: 2 with worker processes or a ByteCorpus, else 0,
            since a dataset run on another thread would share torch's random generator with the model.
        ranks, rank: The data-parallel group; each rank takes one contiguous block of every window.
        loader_options: Further arguments of the DataLoader made for a dataset (num_workers, ...).
    """

    def __init__(
        self,
        data: Any,
        micro_batch_size: int | None = None,
        accumulation: int = 1,
        *,
        seed: int = 42,
        shuffle: bool | None = None,
        epochs: int | None = 1,
        prefetch: int | None = None,
        ranks: int = 1,
        rank: int = 0,
        **loader_options: Any,
    ) -> None:
        _check_options(data, micro_batch_size, accumulation, epochs, prefetch, loader_options)
        self._feed = _feed_of(
            data,
            micro_batch_size,
            accumulation,
            seed,
            shuffle,
            ranks,
            rank,
            loader_options,
        )
        if prefetch is None:
            quiet = isinstance(getattr(data, "dataset", data), ByteCorpus)
            prefetch = 2 if quiet or self._feed.num_workers > 0 else 0
        self._prefetch, self._epochs = prefetch, epochs
        self._epoch, self._offset = 0, 0
        self._open: Iterator | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def cursor(self) -> int:
        """Global index of the next window's first sample (of its first batch where data has no length)."""
        if self._feed.unit == "samples":
            return self._epoch * self._feed.size + self._offset
        return self._offset

    def __iter__(self) -> WindowIterator:
        return self

    def __next__(self) -> list[Any]:
        with torch.profiler.record_function("poise::data"):
            return self._next()

    def _next(self) -> list[Any]:
        while True:
            if self._epochs is not None and self._epoch >= self._epochs:
                raise StopIteration
            if self._open is None:
                self._open = self._start()
            try:
                window, self._offset = next(self._open)
                return window
            except StopIteration:
                self._finish_epoch()
            except BaseException:
                self.close()  # the position stays: the next call reads the same window again
                raise

    def _start(self) -> Iterator:
        # Worker processes are made here, on the caller's thread; the reading thread only takes batches.
        windows = self._feed.windows(self._epoch, self._offset)
        return ReadAhead(windows, self._prefetch) if self._prefetch > 0 else windows

    def _finish_epoch(self) -> None:
        started_empty = self._offset == 0
        self.close()
        if started_empty:
            raise Error("[data] an epoch without any batch; give data with one sample or more")
        self._epoch, self._offset = self._epoch + 1, 0

    def seek(self, cursor: int) -> None:
        """Continues at this global sample index, which must be the start of a window."""
        if self._feed.unit != "samples":
            raise Error("[data] data without a length has no sample index; use load_state_dict")
        self._move(*divmod(cursor, self._feed.size))

    def state_dict(self) -> dict[str, Any]:
        """Where the next window starts; windows read ahead do not count."""
        return {"epoch": self._epoch, "offset": self._offset, **self._feed.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same(state, self._feed.identity())
        self._move(state["epoch"], state["offset"])

    def _move(self, epoch: int, offset: int) -> None:
        if epoch < 0 or offset < 0:
            raise Error(f"[data] position is epoch {epoch}, offset {offset}; give 0 or more")
        self.close()
        self._epoch, self._offset = epoch, offset

    def skip_epoch(self) -> None:
        """Continues with the next epoch's first window."""
        self._move(self._epoch + 1, 0)

    def end_after(self, epochs: int) -> None:
        """There are so many in all."""
        self._epochs = epochs

    def set_accumulation(self, batches: int) -> None:
        """Batches of the windows to come. Data in an order of its own is not read ahead then."""
        if not self._feed.set_accumulation(batches):
            return
        if self._feed.unit == "samples":
            self.close()  # what was drawn ahead was dealt out for the old windows
        elif self._prefetch > 0:
            raise Error(
                "[data] windows of data with an order of its own are read ahead at their old length; "
                "set prefetch to 0"
            )

    def close(self) -> None:
        """Stops the reading thread and the workers; the next window starts them again."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()


def _check_options(
    data: Any,
    micro_batch_size: int | None,
    accumulation: int,
    epochs: int | None,
    prefetch: int | None,
    loader_options: Mapping[str, Any],
) -> None:
    least = {"micro_batch_size": 1, "accumulation": 1, "epochs": 0, "prefetch": 0}
    given = (micro_batch_size, accumulation, epochs, prefetch)
    for (name, lowest), value in zip(least.items(), given, strict=False):
        if value is not None and value < lowest:
            raise Error(f"[data] {name} is {value}; give {lowest} or more")
    own_batches = not _is_map_style(data) and not isinstance(data, IterableDataset)
    if own_batches and (micro_batch_size is not None or loader_options):
        names = ", ".join([*(["micro_batch_size"] if micro_batch_size else []), *loader_options])
        raise Error(
            f"[data] {names} given with data that makes its own batches ({type(data).__name__}); "
            "set it there, or pass the dataset"
        )


def _is_map_style(data: Any) -> bool:
    # By what it can do: the datasets of other libraries need not derive from torch's.
    if isinstance(data, (DataLoader, IterableDataset, Mapping)):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _feed_of(
    data: Any,
    micro_batch_size: int | None,
    accumulation: int,
    seed: int,
    shuffle: bool | None,
    ranks: int,
    rank: int,
    loader_options: dict[str, Any],
) -> MapFeed | LoaderFeed:
    if _is_map_style(data) or isinstance(data, IterableDataset):
        if _is_map_style(data):
            shuffle = True if shuffle is None else shuffle
        options = {"pin_memory": torch.cuda.is_available(), **loader_options}
        data = DataLoader(data, batch_size=micro_batch_size or 1, **options)
    if isinstance(data, DataLoader) and not has_own_order(data):
        return MapFeed(data, accumulation, seed, shuffle, ranks, rank)
    if ranks > 1:
        raise Error(
            "[data] data with an order of its own is not split over ranks; split it in its sampler"
        )
    if isinstance(data, Iterable):
        return LoaderFeed(data, accumulation, seed)
    raise Error(
        f"[data] no batches in a {type(data).__name__}; give a Dataset, a DataLoader or an iterable"
    )
