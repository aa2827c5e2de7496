"""Recurrent layers: their weights stay where the engine put them."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn


class StaysInPlace:
    """Stands in for an RNN's flatten_parameters, which many models call in every forward: on a GPU it
    moves the weights into one buffer of cuDNN's, out of the engine's memory. cuDNN copies them
    together at each call then."""

    def __init__(self, module: nn.RNNBase) -> None:
        self._module = module

    def __call__(self) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module belongs to no engine; while it is made, it has its class's alone.
        return getattr, (self._module, "flatten_parameters")

    def remove(self) -> None:
        if self._module.__dict__.get("flatten_parameters") is self:
            del self._module.__dict__["flatten_parameters"]


def keep_in_place(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Until `undo` is closed."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = StaysInPlace(module)
            undo.callback(module.flatten_parameters.remove)
