"""The tensors inside what a block gets and gives: in tuples, lists, dictionaries, dataclasses and objects.

A block's tensors must be found whatever they come in, since their gradients tell where its backward
begins and ends. torch's pytree alone knows no dataclass and no class of the user's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All of them, each once."""
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}  # keeps what it names: an id is of one object while that lives
    _find(value, found, seen)
    return list(found.values())


def _find(value: Any, found: dict[int, torch.Tensor], seen: dict[int, Any]) -> None:
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)
        elif id(leaf) not in seen:
            inside = _contents(leaf)
            if inside:
                seen[id(leaf)] = leaf
                _find(inside, found, seen)


def _contents(value: Any) -> list[Any]:
    """What an object that pytree does not know holds."""
    if isinstance(value, MutableMapping):
        return list(value.values())
    if isinstance(value, MutableSequence):
        return list(value)
    if isinstance(value, (type, nn.Module)) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).values())


class Exchanged:
    """Arguments in which other tensors stand for the given ones while a forward runs.

    Lists, dictionaries and dataclasses stay the caller's own objects, so that what forward does to
    them is done: their entries are exchanged in place, and put back by `put_back`.

    Attributes:
      tensors: the given ones, each once.
      args, kwargs: the arguments as they are now.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._swaps: list[tuple[Any, Any, Any, Any]] = []  # container, key, before, meanwhile
        found: dict[int, torch.Tensor] = {}
        self._collect(args, found, set())
        self._collect(tuple(kwargs.values()), found, set())
        self.tensors = list(found.values())

    def _collect(self, value: Any, found: dict[int, torch.Tensor], seen: set[int]) -> None:
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), value)
            return
        if isinstance(value, (int, float, str, type(None))) or id(value) in seen:
            return
        seen.add(id(value))
        for inside in _entries(value):
            self._collect(inside, found, seen)

    def exchange(self, others: list[torch.Tensor]) -> None:
        """Puts `others` into the places of `tensors`."""
        exchange = {
            id(mine): other
            for mine, other in zip(self.tensors, others, strict=True)
            if other is not mine
        }
        if not exchange:
            return
        seen: set[int] = set()
        self.args = tuple(self._exchanged(value, exchange, seen) for value in self.args)
        self.kwargs = {
            n: self._exchanged(value, exchange, seen) for n, value in self.kwargs.items()
        }

    def _exchanged(self, value: Any, exchange: dict[int, torch.Tensor], seen: set[int]) -> Any:
        if isinstance(value, torch.Tensor):
            return exchange.get(id(value), value)
        if _is_open(value):
            if id(value) not in seen:
                seen.add(id(value))
                self._exchange_in(value, exchange, seen)
            return value
        parts, structure = _parts(value)
        others = [self._exchanged(part, exchange, seen) for part in parts]
        if all(a is b for a, b in zip(parts, others, strict=True)):
            return value
        if structure is not None:
            return tree_unflatten(others, structure)
        return value._make(others) if hasattr(value, "_make") else type(value)(others)

    def _exchange_in(
        self, container: Any, exchange: dict[int, torch.Tensor], seen: set[int]
    ) -> None:
        for key, before in list(_items(container)):
            other = self._exchanged(before, exchange, seen)
            if other is not before:
                _put(container, key, other)
                self._swaps.append((container, key, before, other))

    def put_back(self) -> None:
        """What forward left in its place is again what was given."""
        for container, key, before, meanwhile in reversed(self._swaps):
            if any(k == key and value is meanwhile for k, value in _items(container)):
                _put(container, key, before)
        self._swaps.clear()


def _is_open(value: Any) -> bool:
    """Whether its entries can be exchanged in place."""
    if isinstance(value, (MutableMapping, MutableSequence)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, MutableMapping):
        return container.items()
    if isinstance(container, MutableSequence):
        return enumerate(container)
    return [
        (field.name, getattr(container, field.name))
        for field in dataclasses.fields(container)
        if hasattr(container, field.name)
    ]


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (MutableMapping, MutableSequence)):
        container[key] = value
    else:
        object.__setattr__(container, key, value)  # a frozen one, too


def _entries(value: Any) -> Iterable[Any]:
    return [inside for _, inside in _items(value)] if _is_open(value) else _parts(value)[0]


def _parts(value: Any) -> tuple[Iterable[Any], Any]:
    """What a tuple holds, or what pytree finds in a class that its owner registered, with its structure.

    Without is_leaf of tree_flatten, whose closure is a cycle that would hold the tensors on.
    """
    if isinstance(value, tuple):
        return value, None
    leaves, structure = tree_flatten(value)
    return ((), None) if structure.is_leaf() else (leaves, structure)
