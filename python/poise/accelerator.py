"""Where a DeepSpeed script computes: `from deepspeed.accelerator import get_accelerator`."""

from __future__ import annotations

import torch

from poise import ranks


class Accelerator:
    """The GPUs of this machine, or its CPU."""

    def device_name(self, index: int | None = None) -> str:
        kind = "cuda" if self.is_gpu() else "cpu"
        return kind if index is None or kind == "cpu" else f"{kind}:{index}"

    def current_device_name(self) -> str:
        return str(ranks.device())

    def current_device(self) -> int:
        return ranks.device().index or 0

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.is_gpu() else 1

    def set_device(self, index: int) -> None:
        if self.is_gpu():
            torch.cuda.set_device(index)

    def is_gpu(self) -> bool:
        return torch.cuda.is_available()

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "nccl" if self.is_gpu() else "gloo"

    def synchronize(self) -> None:
        if self.is_gpu():
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if self.is_gpu():
            torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        """Bytes of GPU memory; 0 without one: engine.memory() counts the host's."""
        return torch.cuda.memory_allocated() if self.is_gpu() else 0

    def max_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated() if self.is_gpu() else 0

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self.is_gpu() else True

    def is_fp16_supported(self) -> bool:
        return True


def get_accelerator() -> Accelerator:
    return Accelerator()
