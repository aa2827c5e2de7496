"""What subclasses of transformers' Trainer call on self.accelerator, over poise's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poise._C import Group


class AcceleratorView:
    """Backward, and where this rank is.

    Args:
      group: the ranks.
      device: of this one.
      backward: takes a micro-batch's loss.
    """

    def __init__(
        self, group: Group, device: torch.device, backward: Callable[[torch.Tensor], None]
    ) -> None:
        self._group, self._backward = group, backward
        self.device = device
        self.num_processes, self.process_index = group.size, group.rank
        self.is_main_process = self.is_local_main_process = group.rank == 0

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        self._backward(loss)

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return getattr(model, "_orig_mod", model)

    def wait_for_everyone(self) -> None:
        self._group.barrier("wait_for_everyone")

    def print(self, *values: Any, **options: Any) -> None:
        if self.is_main_process:
            print(*values, **options)
