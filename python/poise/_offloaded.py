"""Runs chosen modules so that what their forward saves for backward waits away from the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from poise import _C
from poise._units import UnitForward


class OffloadedForward(UnitForward):
    """Stands in for a module's forward, inside the one that gathers its unit."""

    def __init__(self, module: nn.Module, scope: _C.ActivationScope) -> None:
        super().__init__(module, unit=None)
        self._scope = scope

    # A compiler around it would move what is saved out of the scope.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        with self._scope:
            return self._forward(*args, **kwargs)


def attach(modules: list[nn.Module], scope: _C.ActivationScope) -> list[OffloadedForward]:
    made = []
    for module in modules:
        module.forward = OffloadedForward(module, scope)
        made.append(module.forward)
    return made
