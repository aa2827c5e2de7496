"""loss.backward() in a loop over a wrapped model, and in a Trainer's training_step: of a loss that was computed
from the model's outputs it is model.backward(loss), or the step's.

Outputs of a wrapped model leave a mark in autograd's graph. torch.autograd.backward, which every
Tensor.backward() calls, is replaced by one that looks below the loss for marks, and for parameters.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from poise._C import Error
from poise._tensors import tensors_in
from poise.engine import Engine, engine_of

logger = logging.getLogger("poise")

_MARK = "poise.wrapped_model"  # in the metadata of a node


class Taker(Protocol):
    """Who makes an engine's micro-batch of a loss.

    Attributes:
      engine: its parameters are the model's.
      room: what its errors begin with.
      takes_unmarked: whether it takes what reaches those parameters without a mark.
    """

    engine: Engine | None
    room: str
    takes_unmarked: bool

    def backward(self, loss: torch.Tensor) -> None: ...

    def notice_division(self, loss: torch.Tensor) -> None: ...


def watch(taker: Taker) -> None:
    """From now on backward() of a loss below which the taker's model is goes to taker.backward()."""
    installed = _installed()
    installed.takers.add(taker)
    weakref.finalize(taker, installed.leave).atexit = False


@contextlib.contextmanager
def taken_by(taker: Taker) -> Iterator[None]:
    """The same for a while."""
    installed = _installed()
    installed.takers.add(taker)
    try:
        yield
    finally:
        installed.takers.discard(taker)
        installed.leave()


def mark(outputs: Any, taker: Taker) -> None:
    """What a loss is computed from."""
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[_MARK] = weakref.ref(taker)


def _installed() -> PlainBackward:
    """The one in torch.autograd.backward; put there, around what is there, where it is not yet."""
    there = torch.autograd.backward
    if not isinstance(there, PlainBackward):
        torch.autograd.backward = there = PlainBackward(there)
    return there


class PlainBackward:
    """Stands in for torch.autograd.backward.

    Attributes:
      takers: whose losses are not torch's own; they go with their owners.
    """

    def __init__(self, torchs: Callable[..., None]) -> None:
        self.takers: weakref.WeakSet[Taker] = weakref.WeakSet()
        self._torchs = torchs
        self._running = 0  # backwards of torch's own
        functools.update_wrapper(self, torchs)

    def leave(self) -> None:
        """Puts back what was there, where nobody takes a loss any more and nothing was put around this one."""
        if not list(self.takers) and torch.autograd.backward is self:
            torch.autograd.backward = self._torchs

    def __call__(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        taker = _taker_of(tensors, list(self.takers))
        if taker is None:
            if self._running > 0:
                _refuse_recomputed(tensors, list(self.takers))
            self._running += 1
            try:
                self._torchs(
                    tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
                )
            finally:
                self._running -= 1
            return
        alone = tensors if isinstance(tensors, torch.Tensor) else [*tensors][0]
        several = alone is not tensors and len(tensors) > 1
        gradients = [g for g in (grad_tensors, grad_variables) if not _is_none(g)]
        if several or gradients or create_graph or retain_graph or inputs is not None:
            raise Error(
                f"[{taker.room}] backward() with gradient, retain_graph, create_graph, inputs or several "
                "losses: a micro-batch has one loss and one plain backward; add the losses up"
            )
        taker.notice_division(alone)
        taker.backward(alone)


def _refuse_recomputed(tensors: Any, takers: list[Taker]) -> None:
    """A reentrant checkpoint runs its part again within a backward, and a backward of that. Where a call of a
    wrapped model is in it, the loss had no mark: nobody took it."""
    if not takers or torch._C._current_graph_task_id() == -1:
        return
    for node in _nodes([tensors] if isinstance(tensors, torch.Tensor) else tensors):
        marked = node.metadata.get(_MARK)
        taker = None if marked is None else marked()
        if taker is not None:
            raise Error(
                f"[{taker.room}] a call of a wrapped model is inside a reentrant checkpoint, which hides it from "
                "backward(): its gradients would be lost; give torch's checkpoint use_reentrant=False, or let "
                "the model recompute its blocks (checkpointing in config)"
            )


def _is_none(gradients: Any) -> bool:
    return gradients is None or (
        isinstance(gradients, (list, tuple)) and all(one is None for one in gradients)
    )


def _taker_of(tensors: Any, takers: list[Taker]) -> Taker | None:
    """Whose backward it is; None: torch's own. Raises Error where it is none that can be told."""
    if not takers or torch._C._current_graph_task_id() != -1:  # within a backward: a recomputation
        return None
    of_engines = {id(taker.engine): taker for taker in takers if taker.engine is not None}
    found: dict[int, Taker] = {}
    reached = None
    for node in _nodes([tensors] if isinstance(tensors, torch.Tensor) else tensors):
        marked = node.metadata.get(_MARK)
        taker = None if marked is None else marked()
        if taker is None and hasattr(node, "variable"):
            owner = of_engines.get(id(engine_of(node.variable)))
            if owner is not None and owner.takes_unmarked:
                taker = owner
            elif owner is not None:
                reached = node.variable
        if taker is not None:
            found[id(taker)] = taker
            if len(of_engines) == 1:
                break
    if len(found) > 1:
        raise Error(
            f"[loop] backward() of a loss that comes from {len(found)} wrapped models; say whose update it "
            "is for: model.backward(loss), or engine.backward(loss)"
        )
    if not found and reached is not None:
        name = engine_of(reached).name_of(reached)
        raise Error(
            f"[loop] backward() reaches parameter '{name}' of a wrapped model, but not through a call of "
            "that: its gradient would be lost; call what poise.wrap or initialize returned, and add to "
            "the micro-batch's loss what is computed from parameters alone"
        )
    return next(iter(found.values()), None)


def _nodes(tensors: Any) -> Iterator[Any]:
    """Of the graph, those near the loss first."""
    level = [t.grad_fn for t in tensors if getattr(t, "grad_fn", None) is not None]
    seen = set(level)
    while level:
        yield from level
        below = {node: None for one in level for node, _ in one.next_functions if node is not None}
        level = [node for node in below if node not in seen]
        seen.update(level)


def divisor_of(loss: torch.Tensor) -> float | None:
    """What number the loss was divided by last: loss / n, or loss * (1 / n); None: it was not."""
    node = loss.grad_fn
    name = "" if node is None else node.name()
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    other = getattr(node, "_saved_other", None)
    if other is None or other.dim() > 0 or other.device.type != "cpu" or float(other) == 0:
        return None
    return float(other) if name == "DivBackward0" else round(1 / float(other), 9)
