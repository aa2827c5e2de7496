"""loss.backward() in a loop over a wrapped model: of a loss that the loop computed from the model's outputs it
is model.backward(loss).

Outputs leave a mark in autograd's graph. torch.autograd.backward, which every Tensor.backward() calls, is
replaced by one that looks for marks below the loss.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from poise._C import Error
from poise._tensors import tensors_in
from poise.engine import engine_of

if TYPE_CHECKING:
    from poise.wrapped_model import WrappedModel

logger = logging.getLogger("poise")

_MARK = "poise.wrapped_model"  # in the metadata of a node
_torchs = torch.autograd.backward
_models: weakref.WeakSet[WrappedModel] = weakref.WeakSet()


def watch(model: WrappedModel) -> None:
    """From now on backward() of a loss below which the model is goes to model.backward()."""
    _models.add(model)
    torch.autograd.backward = _backward


def mark(outputs: Any, model: WrappedModel) -> None:
    """What a loss is computed from."""
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[_MARK] = weakref.ref(model)


@functools.wraps(_torchs)
def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    model = _model_below(tensors)
    if model is None:
        _torchs(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        return
    alone = tensors if isinstance(tensors, torch.Tensor) else [*tensors][0]
    several = alone is not tensors and len(tensors) > 1
    gradients = [g for g in (grad_tensors, grad_variables) if not _is_none(g)]
    if several or gradients or create_graph or retain_graph or inputs is not None:
        raise Error(
            "[loop] backward() with gradient, retain_graph, create_graph, inputs or several losses: a "
            "micro-batch has one loss and one plain backward; add the losses up"
        )
    _warn_of_division(alone, model)
    model.backward(alone)


def _is_none(gradients: Any) -> bool:
    return gradients is None or (
        isinstance(gradients, (list, tuple)) and all(one is None for one in gradients)
    )


def _model_below(tensors: Any) -> WrappedModel | None:
    """Whose backward it is; None: torch's own. Raises Error where it is none that can be told."""
    if not _models or torch._C._current_graph_task_id() != -1:  # within a backward: a recomputation
        return None
    engines = {id(model.engine) for model in _models}
    found: dict[int, WrappedModel] = {}
    reached = None
    for node in _nodes([tensors] if isinstance(tensors, torch.Tensor) else tensors):
        marked = node.metadata.get(_MARK)
        model = None if marked is None else marked()
        if model is not None:
            found[id(model)] = model
            if len(engines) == 1:
                break
        elif hasattr(node, "variable") and id(engine_of(node.variable)) in engines:
            reached = node.variable
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


def _warn_of_division(loss: torch.Tensor, model: WrappedModel) -> None:
    """Plain loops divide by the accumulation, which the engine does, by counts."""
    steps, node = model.engine.accumulation, loss.grad_fn
    divisor = getattr(node, "_saved_other", None) if node.name() == "DivBackward0" else None
    if steps > 1 and divisor is not None and divisor.numel() == 1 and float(divisor) == steps:
        if not model.__dict__.setdefault("_division_was_told", False):
            logger.warning(
                "[loop] the loss is divided by %d, as many micro-batches as a window has: the mean over the "
                "window is made by the update, so that gradients are %d times too small; leave the "
                "division out",
                steps,
                steps,
            )
            model._division_was_told = True
