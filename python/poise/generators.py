"""The random generators of a process: torch's are the engine's to save, Python's and numpy's are not."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from poise.seeding import seed_everything


class Snapshot:
    """All generators as they are now, to go back to: what an open window has drawn is drawn again."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """What runs meanwhile draws as it likes: afterwards, also by an exception, the generators are as they
    were. So what lies between two updates of a run cannot move its dropout."""
    before = Snapshot()
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The same, and what runs meanwhile draws what it would draw at any other time."""
    with untouched():
        seed_everything(seed)
        yield


def own_texts() -> dict[str, str]:
    """Python's and numpy's generators as texts, for Engine.save(own=...)."""
    version, words, gauss = random.getstate()
    texts = {"random": json.dumps([version, list(words), gauss])}
    if "numpy" in sys.modules:
        name, words, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        state = [str(name), [int(word) for word in words], int(position), int(has_gauss), gauss]
        texts["numpy.random"] = json.dumps(state)
    return texts


def take_texts(own: Mapping[str, str]) -> None:
    """Sets them as `own_texts` found them; what is missing stays as it is."""
    if "random" in own:
        version, words, gauss = json.loads(own["random"])
        random.setstate((version, tuple(words), gauss))
    if "numpy.random" in own:
        import numpy

        name, words, position, has_gauss, gauss = json.loads(own["numpy.random"])
        state: tuple[Any, ...] = (
            name, numpy.array(words, dtype=numpy.uint32), position, has_gauss, gauss,
        )  # fmt: skip
        numpy.random.set_state(state)
