"""How much of what its device could do a run does: model FLOPs utilization (MFU), and memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from poise import _C, model_view

NOT_TRAINED = (
    2.0  # forwards' worth of an update without gradients of weights: itself, and through it
)


class Utilization:
    """Counts the FLOPs that the model asks for, whatever is recomputed, against the device's peak.

    What a forward takes is measured in the first micro-batch (matrix products, convolutions and
    attention; where anything is compiled it is taken as 2 for each parameter and position) and grows
    with the positions of a batch. Training takes a second forward's worth to pass gradients through, and a third
    one for the part of the parameters that is trained: 6 FLOPs for each parameter and token where all
    are, as in PaLM (Chowdhery et al. 2022, appendix B).

    Args:
      model: of the run.
      peak_flops: of one device per second; 0: not known, nothing is counted.
    """

    def __init__(self, model: nn.Module, peak_flops: float) -> None:
        self._model, self._peak = model, peak_flops
        self._by_position: float | None = None  # FLOPs of a forward
        self._positions = 0  # since the last take()
        self.flops = 0.0  # of the run

    def window(self, batches: Iterable[Any]) -> None:
        """Counts an update's micro-batches."""
        if self._peak > 0:
            self._positions += sum(map(positions, batches))

    def around(self, loss_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, measured at its first call, where that is to be known."""
        if self._peak <= 0 or self._by_position is not None:
            return loss_fn
        if model_view.has_compiled_parts(self._model):
            self._by_position = 2.0 * sum(p.numel() for p in self._model.parameters())
            return loss_fn

        def measured(batch: Any) -> Any:
            if self._by_position is not None:
                return loss_fn(batch)
            with ForwardFlops() as forward:
                loss = loss_fn(batch)
            self._by_position = forward.count / max(1, positions(batch))
            return loss

        return measured

    def take(self, seconds: float) -> float | None:
        """The MFU since the last call, in [0, 1]; None: it is not known."""
        done, self._positions = self._positions, 0
        if self._peak <= 0 or self._by_position is None:
            return None
        flops = done * self._by_position * (NOT_TRAINED + trained_share(self._model))
        self.flops += flops
        return flops / max(seconds, 1e-9) / self._peak


class ForwardFlops(TorchDispatchMode):
    """Adds up the FLOPs of what torch runs while it is active, by torch's own formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.count += formula(*args, **kwargs, out_val=result)
        elif "scaled_dot_product" in function._overloadpacket.__name__:  # the CPU's, in no registry
            self.count += sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
        return result


def positions(batch: Any) -> int:
    """Of a batch: tokens where it has any (integers of two dimensions), else samples."""
    tensors = [t for t in tree_leaves(_plain(batch)) if isinstance(t, torch.Tensor) and t.dim() > 0]
    for tensor in tensors:
        if tensor.dim() == 2 and not tensor.is_floating_point():
            return tensor.numel()
    return tensors[0].shape[0] if tensors else 1


def trained_share(model: nn.Module) -> float:
    """Of the parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    whole = sum(size for size, _ in sizes)
    return sum(size for size, trained in sizes if trained) / whole if whole else 0.0


def peak_flops(given: float | None, device: torch.device, half: bool) -> float:
    """FLOP/s of a device: the given ones, else those of the planner's table; 0: not known.

    Args:
      given: None: look it up.
      device: of the model.
      half: the forward runs in bf16 or fp16.
    """
    if given is not None:
        return float(given)
    if device.type != "cuda":
        return 0.0
    known = known_device(
        torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    )
    return 0.0 if known is None else float(known["half_flops" if half else "float_flops"])


def known_device(name: str, memory: int) -> dict[str, Any] | None:
    """The entry of the planner's table that a driver's name and its memory (bytes) mean."""
    words = name.replace("-", " ").split()
    fits = []
    for entry in _C.known_devices():
        model = entry["name"].rsplit("-", 1)[0].split("-")
        if any(words[i : i + len(model)] == model for i in range(len(words))):
            fits.append(entry)
    return min(fits, key=lambda entry: abs(entry["memory"] - memory), default=None)


def memory_bytes(budget: int, device: torch.device) -> int:
    """What a run's peak is compared with: its budget (0: none), else all memory of the device."""
    if budget:
        return budget
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch
