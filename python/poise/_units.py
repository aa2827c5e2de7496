"""Runs each unit of a model while its parameters are whole (zero.stage 3)."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from poise import _C


class UnitForward:
    """Stands in for a module's forward: gathers its unit before, releases it after.

    A forward of its own rather than module hooks, because a hook is not told of every exception
    that leaves a forward (the early end of a recompute is none of `Exception`).
    """

    def __init__(self, module: nn.Module, unit: _C.Unit) -> None:
        self.module = module
        self.unit = unit
        self.own = module.__dict__.get("forward")  # None: the class's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _enter(self.unit, args, kwargs)
        try:
            outputs = self._forward(*args, **kwargs)
        except BaseException:
            _abandon(self.unit)
            raise
        _leave(self.unit, outputs)
        return outputs

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple:
        # A copy of the module (copy.deepcopy, torch.save of a whole model) belongs to no engine.
        if self.own is not None:
            return _itself, (self.own,)
        return types.MethodType, (type(self.module).forward, self.module)

    def remove(self) -> None:
        """Gives the module its own forward back."""
        if self.module.__dict__.get("forward") is not self:
            return  # something else was put over it
        del self.module.__dict__["forward"]
        if self.own is not None:
            self.module.forward = self.own


def _itself(value: Any) -> Any:
    return value


def attach(units: list[tuple[nn.Module, _C.Unit]]) -> list[UnitForward]:
    """Puts a UnitForward over every module's forward, outermost."""
    made = []
    for module, unit in units:
        module.forward = UnitForward(module, unit)
        made.append(module.forward)
    return made


# Graph breaks for torch.compile: what runs between them is still compiled.


@torch.compiler.disable
def _enter(unit: _C.Unit, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    leaves, structure = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    entered = unit.enter([leaves[i] for i in places])
    for i, tensor in zip(places, entered, strict=True):
        if tensor is not leaves[i]:
            leaves[i] = tensor
    return tree_unflatten(leaves, structure)


@torch.compiler.disable
def _leave(unit: _C.Unit, outputs: Any) -> None:
    leaves, _ = tree_flatten(outputs)
    unit.leave([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


@torch.compiler.disable
def _abandon(unit: _C.Unit) -> None:
    unit.abandon()
