"""Runs each unit of a model while its parameters are whole (zero.stage 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poise import _C
from poise._C import Error
from poise._tensors import Exchanged, tensors_in


class UnitForward:
    """Stands in for a module's forward: gathers its unit before, releases it after.

    A forward of its own rather than module hooks, because a hook is not told of every exception
    that leaves a forward (the early end of a recompute is none of `Exception`).
    """

    def __init__(self, module: nn.Module, unit: _C.Unit) -> None:
        self.module = module
        self.unit = unit
        self.own = module.__dict__.get("forward")  # None: the class's
        self._modules = list(module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _enter(self.unit, args, kwargs)
        try:
            outputs = self._forward(*given.args, **given.kwargs)
        except BaseException:
            _abandon(self.unit, given)
            raise
        _leave(self.unit, given, outputs, self._modules)
        return outputs

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple:
        # A copy of the module (copy.deepcopy, torch.save of a whole model) belongs to no engine.
        if self.own is not None:
            return _itself, (self.own,)
        return getattr, (self.module, "forward")  # while it is made, it has its class's alone

    def remove(self) -> None:
        """Gives the module its own forward back."""
        if self.module.__dict__.get("forward") is not self:
            return  # something else was put over it
        del self.module.__dict__["forward"]
        if self.own is not None:
            self.module.forward = self.own


def _itself(value: Any) -> Any:
    return value


class Refusal:
    """A state_dict hook of a sharded model: refuses what would be read, for as long as `refuses` says."""

    def __init__(self, refuses: Callable[[], bool]) -> None:
        self._refuses = refuses

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._refuses():
            raise Error(
                "[engine] state_dict() of a model whose parameters are sharded (zero.stage 3) or "
                "offloaded; "
                "use engine.state_dict(), or call it inside engine.gathered(), on all ranks"
            )

    def __reduce__(self) -> tuple:
        return _itself, (_allow,)  # a copy of the module is whole


def _allow(module: nn.Module, prefix: str, keep_vars: bool) -> None: ...


def attach(units: list[tuple[nn.Module, _C.Unit]]) -> list[UnitForward]:
    """Puts a UnitForward over every module's forward, outermost."""
    made = []
    for module, unit in units:
        module.forward = UnitForward(module, unit)
        made.append(module.forward)
    return made


# Graph breaks for torch.compile: what runs between them is still compiled.


@torch.compiler.disable
def _enter(unit: _C.Unit, args: tuple, kwargs: dict[str, Any]) -> Exchanged:
    given = Exchanged(args, kwargs)
    given.exchange(unit.enter(given.tensors))
    return given


@torch.compiler.disable
def _leave(unit: _C.Unit, given: Exchanged, outputs: Any, modules: list[nn.Module]) -> None:
    given.put_back()
    found = tensors_in(outputs)
    if torch.is_grad_enabled():
        # A term of the loss that a module keeps for whoever asks: its backward may come before theirs.
        kept = [v for m in modules for v in vars(m).values() if isinstance(v, torch.Tensor)]
        found += [v for v in kept if v.grad_fn is not None and all(v is not one for one in found)]
    unit.leave(found)


@torch.compiler.disable
def _abandon(unit: _C.Unit, given: Exchanged) -> None:
    given.put_back()
    unit.abandon()
