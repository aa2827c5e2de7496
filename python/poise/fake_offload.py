"""Offloaded activations of a traced model: what ActivationOffload of the core holds, without memory.

Saved tensors leave, two of them still on their way; backward gets them back as it asks, and two that were
saved before what it asked for.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable

import torch

MIN_BYTES = 65536  # offload.activation_min_bytes
LEAVING = AHEAD = 2
NEARBY = 32  # the same tensor is saved again within so many


class _Ticket:
    """What a saved tensor was; `back`: it is here again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.sizes, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.device = tensor.device
        self.storage = weakref.ref(tensor.untyped_storage())
        self.offset = tensor.storage_offset()
        self.back: torch.Tensor | None = None
        self.asked = False

    def is_of(self, tensor: torch.Tensor) -> bool:
        same = (tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset())
        mine = (self.sizes, self.strides, self.dtype, self.offset)
        return self.storage() is tensor.untyped_storage() and same == mine

    def fetch(self) -> None:
        self.back = torch.empty_strided(
            self.sizes, self.strides, dtype=self.dtype, device=self.device
        )


class Offload:
    """Saved-tensor hooks around a forward. `sent`: bytes that have left.

    Args:
      stays: whether a tensor is none that leaves: a parameter, a buffer.
    """

    def __init__(self, stays: Callable[[torch.Tensor], bool]) -> None:
        self.sent = 0
        self._stays = stays
        self._leaving: collections.deque[torch.Tensor] = collections.deque(maxlen=LEAVING)
        self._saved: list[weakref.ref[_Ticket]] = []

    def hooks(self) -> contextlib.AbstractContextManager:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Ticket:
        size = tensor.numel() * tensor.element_size()
        if size < MIN_BYTES or self._stays(tensor) or not _is_dense(tensor):
            return tensor
        for reference in self._saved[-NEARBY:]:
            known = reference()
            if known is not None and known.is_of(tensor):
                return known
        ticket = _Ticket(tensor)
        self._leaving.append(tensor.detach())
        self._saved.append(weakref.ref(ticket))
        self.sent += size
        return ticket

    def _unpack(self, packed: torch.Tensor | _Ticket) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.back is None:
            packed.fetch()
        packed.asked = True
        self._fetch_ahead(packed)
        tensor, packed.back = packed.back, None
        assert tensor is not None
        return tensor

    def _fetch_ahead(self, of: _Ticket) -> None:
        at = len(self._saved) - 1
        while at >= 0 and self._saved[at]() is not of:
            at -= 1
        ahead = 0
        for reference in reversed(self._saved[: max(0, at)]):
            ticket = reference()
            if ticket is None or ticket.asked:
                continue
            ahead += 1
            if ticket.back is None:
                ticket.fetch()
            if ahead == AHEAD:
                return


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory, in whatever order."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
