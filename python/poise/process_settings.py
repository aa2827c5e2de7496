"""What arguments set in torch for the whole process, as transformers does."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger("poise")

TF32_SINCE = (8, 0)  # compute capability: Ampere


def apply(full_determinism: bool, tf32: bool | None, device: torch.device) -> None:
    """Before the first operation on a GPU.

    Args:
      full_determinism: an operation that has no deterministic kernel is an error of torch's.
      tf32: whether fp32 products of a GPU may round their factors; None: as it is.
      device: of the run.
    """
    if full_determinism:
        _make_deterministic()
    if tf32 is None:
        return
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if tf32 and not (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= TF32_SINCE
    ):
        logger.warning("[trainer] tf32: %s computes without it; GPUs since Ampere have it", device)


def _make_deterministic() -> None:
    """CUDA_LAUNCH_BLOCKING, which transformers sets too, makes a run slow and no bit another."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
