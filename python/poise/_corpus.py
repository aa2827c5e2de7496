"""Byte and token files as a torch Dataset, over the mapped C++ corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from poise import _C


class ByteCorpus(Dataset):
    """Files as one row of bytes or tokens; item i is (input, target), int64 of sequence_length each.

    The files are mapped, not copied; workers open them again by fork or spawn.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        sequence_length: int,
        *,
        suffix: str = "",
        element: str = "byte",
        _parts: tuple[tuple[float, int], ...] = (),
    ) -> None:
        given = [paths] if isinstance(paths, (str, Path)) else list(paths)
        self._recipe = ([str(path) for path in given], sequence_length, suffix, element)
        self._parts = _parts
        self.core = _C.ByteCorpus(*self._recipe)
        for fraction, part in _parts:
            self.core = self.core.split(fraction)[part]

    def __len__(self) -> int:
        return len(self.core)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")  # ends `for item in corpus`
        return self.core.sample(index)

    def split(self, fraction: float) -> tuple[ByteCorpus, ByteCorpus]:
        """(train, validation): the last `fraction` of the elements is validation."""
        return self._part(fraction, 0), self._part(fraction, 1)

    def windows(self, micro_batch_size: int, accumulation: int = 1, **options: Any) -> Any:
        """The C++ loader of this corpus: windows of (inputs, targets), the same as a C++ program reads."""
        return _C.WindowLoader(self.core, micro_batch_size, accumulation, **options)

    def _part(self, fraction: float, part: int) -> ByteCorpus:
        paths, length, suffix, element = self._recipe
        parts = (*self._parts, (fraction, part))
        return ByteCorpus(paths, length, suffix=suffix, element=element, _parts=parts)

    def __reduce__(self) -> tuple:
        return (_open_corpus, (*self._recipe, self._parts))


def _open_corpus(paths: list, length: int, suffix: str, element: str, parts: tuple) -> ByteCorpus:
    return ByteCorpus(paths, length, suffix=suffix, element=element, _parts=parts)


def byte_corpus(
    paths: str | Path | Sequence[str | Path],
    sequence_length: int,
    *,
    suffix: str = "",
    element: str = "byte",
) -> ByteCorpus:
    """Files or folders as a torch Dataset of (input, target) pairs.

    Args:
        paths: Files or folders; folders are walked in sorted order.
        sequence_length: Elements of one input.
        suffix: Of the files taken from folders, for example ".py".
        element: "byte", "uint16" or "uint32" (raw little-endian tokens).
    """
    return ByteCorpus(paths, sequence_length, suffix=suffix, element=element)
