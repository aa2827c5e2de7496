"""What `poise train` feeds a model of Python: the byte corpus of the file, or the model's own data.

Every update has as many samples as the banner says: windows run on into the next epoch.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from poise import _C, generators
from poise._C import Error
from poise._corpus import ByteCorpus, byte_corpus
from poise.imported import Imported

logger = logging.getLogger("poise")
_OF_CORPORA = ("train", "validation", "suffix", "validation_fraction", "prefetch")


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
      windows: without end; each the micro-batches of one update. `cursor` says where the next one
        begins, `seek(cursor)` goes on there.
      identity: what must be the same for a cursor to mean the same data.
      validation: makes the micro-batches of one validation; None: there is none.
      description: of the samples, for the banner.
      samples: of one epoch; None where the data does not say.
      update_tokens: of one update; None where the data does not say.
      shift_labels: as in poise.model_call.ModelCall.
    """

    windows: Any
    validation: Callable[[], Iterable[Any]] | None
    description: str
    samples: int | None
    identity: dict[str, Any]
    update_tokens: int | None = None
    shift_labels: bool | None = None


def of_run(
    imported: Imported, settings: dict[str, Any], accumulation: int, given: frozenset[str]
) -> RunData:
    """The data of a run file.

    Args:
      imported: whose datasets are used where it has them.
      settings: every section with every key.
      accumulation: micro-batches of one update.
      given: keys that the file names, such as "data.train".
    """
    if imported.train_dataset is None:
        return _of_corpora(settings, accumulation)
    unused = [f"data.{key}" for key in _OF_CORPORA if f"data.{key}" in given]
    if unused:
        raise Error(
            f"[cli] {', '.join(unused)} given, but model.import returned a dataset of its own; "
            "remove one of them"
        )
    return _of_datasets(imported, settings, accumulation)


def _of_corpora(settings: dict[str, Any], accumulation: int) -> RunData:
    data, batch = settings["data"], settings["batch"]
    length = settings["model"]["sequence_length"]
    train, validation = _corpora(data, length, settings["train"]["validation_batches"])
    windows = train.windows(
        batch["micro_batch_size"],
        accumulation,
        seed=settings["engine"]["seed"],
        shuffle=data["shuffle"],
        run_on=True,
        prefetch=data["prefetch"],
    )
    return RunData(
        windows=windows,
        validation=_validation(validation, settings),
        description=f"{len(train):,} samples of {length} bytes in {train.core.files} files",
        samples=len(train),
        identity=_identity(len(train), settings) | {"sequence_length": length},
        update_tokens=batch["micro_batch_size"] * accumulation * length,
        shift_labels=False,  # targets are the next bytes already
    )


def _corpora(
    data: dict[str, Any], length: int, validation_batches: int
) -> tuple[ByteCorpus, ByteCorpus | None]:
    if not data["train"]:
        raise Error(
            "[cli] data.train is empty; give it files or folders to read, or return a dataset "
            "beside the model"
        )
    train = byte_corpus(data["train"], length, suffix=data["suffix"])
    if validation_batches == 0:
        return train, None
    if data["validation"]:
        return train, byte_corpus(data["validation"], length, suffix=data["suffix"])
    if data["validation_fraction"] == 0:
        return train, None
    return train.split(data["validation_fraction"])


def _of_datasets(imported: Imported, settings: dict[str, Any], accumulation: int) -> RunData:
    data, micro = imported.train_dataset, settings["batch"]["micro_batch_size"]
    samples = _samples(data, "train")
    if settings["train"]["validate_every"] > 0 and imported.eval_dataset is None:
        raise Error(
            f"[cli] train.validate_every is {settings['train']['validate_every']}, but "
            "model.import returned no eval_dataset; return one, or set it to 0"
        )
    if isinstance(data, IterableDataset):
        loader = DataLoader(data, batch_size=micro, generator=torch.Generator())
        windows = _Windows(lambda cursor: _skipped(_repeated(loader), cursor), accumulation, 1)
    else:
        order = _C.Sampler(
            samples,
            seed=settings["engine"]["seed"],
            shuffle=settings["data"]["shuffle"],
            run_on=True,
        )

        # A generator of its own: torch's global one is the model's dropout.
        def batches(cursor: int) -> Iterator[Any]:
            sampler = _EndlessBatches(order, micro, cursor)
            return iter(DataLoader(data, batch_sampler=sampler, generator=torch.Generator()))

        windows = _Windows(batches, accumulation, micro)
    if imported.eval_dataset is not None:
        _samples(imported.eval_dataset, "validate")
    return RunData(
        windows=windows,
        validation=_validation(imported.eval_dataset, settings),
        description="data of unknown length" if samples is None else f"{samples:,} samples",
        samples=samples,
        identity=_identity(samples, settings),
    )


def _samples(data: Any, use: str) -> int | None:
    """Of one pass; None where the data does not say. Raises Error on what is no dataset, or empty."""
    if isinstance(data, IterableDataset):
        return None
    map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not map_style or isinstance(data, (DataLoader, dict)) or len(data) == 0:
        raise Error(
            f"[cli] model.import returned {type(data).__name__} to {use} on; return a torch "
            "dataset of at least one sample (batch.micro_batch_size makes batches of it)"
        )
    return len(data)


class _EndlessBatches:
    """Index lists of micro-batches, epoch after epoch."""

    def __init__(self, order: _C.Sampler, micro_batch_size: int, cursor: int) -> None:
        self._order, self._size, self._cursor = order, micro_batch_size, cursor

    def __iter__(self) -> Iterator[list[int]]:
        cursor = self._cursor
        while True:
            yield self._order.indices(cursor, self._size)
            cursor = self._order.advance(cursor, self._size)


def _repeated(loader: DataLoader) -> Iterator[Any]:
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise Error(
                "[cli] the dataset of model.import gave no sample; it must give at least one"
            )


def _skipped(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Iterable data has no index to seek to: it is read and dropped."""
    if count > 0:
        logger.warning("[cli] resuming iterable data by reading and dropping %d batches", count)
    with generators.untouched():  # the run that goes on has drawn for them
        for _ in itertools.islice(batches, count):
            pass
    return batches


class _Windows:
    """Windows without end, of what `batches(cursor)` gives; `cursor` counts `step` per batch."""

    def __init__(
        self, batches: Callable[[int], Iterator[Any]], accumulation: int, step: int
    ) -> None:
        self._batches, self._accumulation, self._step = batches, accumulation, step
        self.cursor = 0
        self._open: Iterator[Any] | None = None

    def __next__(self) -> list[Any]:
        if self._open is None:
            self._open = self._batches(self.cursor)
        window = list(itertools.islice(self._open, self._accumulation))
        self.cursor += self._accumulation * self._step
        return window

    def seek(self, cursor: int) -> None:
        self.cursor, self._open = cursor, None

    def set_accumulation(self, micro_batches: int) -> None:
        self._accumulation = micro_batches


def _identity(samples: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "samples": samples,
        "seed": settings["engine"]["seed"],
        "shuffle": settings["data"]["shuffle"],
    }


def _validation(
    dataset: Dataset | None, settings: dict[str, Any]
) -> Callable[[], Iterable[Any]] | None:
    count, micro = settings["train"]["validation_batches"], settings["batch"]["micro_batch_size"]
    if dataset is None or count == 0:
        return None
    loader = DataLoader(dataset, batch_size=micro, generator=torch.Generator())
    return lambda: itertools.islice(loader, count)
