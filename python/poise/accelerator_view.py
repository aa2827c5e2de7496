"""What subclasses of transformers' Trainer call on self.accelerator, over poise's engine."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import torch
from torch import nn

from poise import ranks
from poise._C import Group
from poise.own_step import OwnStep


class AcceleratorView:
    """Backward, where this rank is, and what the ranks have.

    Attributes:
      gradient_accumulation_steps: by how many a loss is still to be divided: 1, the engine makes the mean.
      distributed_type: as accelerate calls it.

    Args:
      group: the ranks.
      device: of this one.
      step: takes a micro-batch's loss.
    """

    gradient_accumulation_steps = 1

    def __init__(self, group: Group, device: torch.device, step: OwnStep) -> None:
        self._group, self._step = group, step
        self.device = device
        self.num_processes, self.process_index = group.size, group.rank
        self.is_main_process = group.rank == 0
        here = ranks.here()
        self.local_process_index = here.local or 0
        self.is_local_main_process = self.local_process_index == 0
        gpu = device.type == "cuda"
        self.distributed_type = "NO" if group.size == 1 else "MULTI_GPU" if gpu else "MULTI_CPU"

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        self._step.backward(loss)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last one of its update."""
        return self._step.is_last

    def accumulate(self, *_: Any) -> contextlib.AbstractContextManager:
        """Nothing: the Trainer counts micro-batches."""
        return contextlib.nullcontext()

    def prepare(self, *given: Any, **_: Any) -> Any:
        """The same as they are: the Trainer shares a loader's batches out."""
        return given[0] if len(given) == 1 else given

    def autocast(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager:
        """Nothing: a training_step is in the run's precision anyway."""
        return contextlib.nullcontext()

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return getattr(model, "_orig_mod", model)

    def wait_for_everyone(self) -> None:
        self._group.barrier("wait_for_everyone")

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Those of all ranks, one after the other along the first dimension; all ranks. A scalar counts as
        one row."""
        if self.num_processes == 1:
            return tensor
        return torch.cat([torch.atleast_1d(one) for one in self._of_ranks(tensor)])

    gather_for_metrics = gather  # no sample is there twice

    def reduce(
        self, tensor: torch.Tensor, reduction: str = "sum", scale: float = 1.0
    ) -> torch.Tensor:
        """The sum over all ranks, or their mean; all ranks."""
        if self.num_processes == 1 or reduction == "none":
            return tensor
        total = torch.stack(self._of_ranks(tensor)).sum(0) * scale
        return total / self.num_processes if reduction == "mean" else total

    def print(self, *values: Any, **options: Any) -> None:
        if self.is_local_main_process:
            print(*values, **options)

    def _of_ranks(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = pickle.dumps(tensor.detach().cpu())
        everybodys = ranks.all_bytes(self._group, mine, "accelerator.gather")
        return [pickle.loads(one).to(tensor.device) for one in everybodys]
