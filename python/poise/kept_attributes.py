"""Attributes as they were, after code has run for a trial, or on tensors that have no memory."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

CONTAINERS = (dict, list, set, deque)
LARGE = 4096  # entries of what is data rather: it is not looked into


@contextlib.contextmanager
def kept(*objects: Any) -> Iterator[None]:
    """What is set meanwhile in the objects, of a model in all of its modules (a mask made once, a table of
    positions, a counter, a mode), is undone at the end, in containers of theirs too. Not seen: what is behind
    further objects, and what functions remember."""
    owners = [
        m for one in objects for m in (one.modules() if isinstance(one, nn.Module) else [one])
    ]
    before = [(vars(owner), dict(vars(owner))) for owner in owners]
    seen: set[int] = set()
    inside = [one for _, own in before for value in own.values() for one in _copies(value, seen)]
    try:
        yield
    finally:
        for there, was in [*before, *inside]:
            _put_back(there, was)


def _copies(value: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """A container with a copy of it, and those inside."""
    if not isinstance(value, CONTAINERS) or id(value) in seen:
        return
    seen.add(id(value))
    was = dict(value) if isinstance(value, dict) else list(value)
    yield value, was
    if len(was) <= LARGE:
        for one in list(was.values()) if isinstance(was, dict) else was:
            yield from _copies(one, seen)


def _put_back(there: Any, was: Any) -> None:
    """Touches only what has changed."""
    if isinstance(there, dict):
        pairs = zip(there.items(), was.items(), strict=False)
        if len(there) != len(was) or any(k is not n or v is not m for (k, v), (n, m) in pairs):
            there.clear()
            there.update(was)
    elif len(there) != len(was) or any(a is not b for a, b in zip(there, was, strict=True)):
        there.clear()
        (there.update if isinstance(there, set) else there.extend)(was)


class Counted:
    """What forwards count in a model, as it is now: buffers, the values of those that there are, and plain numbers
    of its modules (steps of an annealing, whether something was set up)."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._buffers = [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._numbers = [
            (vars(module), name, value)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, (int, float))
        ]

    def put_back(self) -> None:
        for there, name, was in (*self._buffers, *self._numbers):
            if there.get(name) is not was:  # a forward may assign a new one
                there[name] = was
        for buffer, value in self._values:
            if buffer.shape == value.shape:
                buffer.data.copy_(value)
            else:
                buffer.data = value
