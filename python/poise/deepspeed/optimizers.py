"""The torch optimizer that a DeepSpeed file asks for; an engine then does its work."""

from __future__ import annotations

from typing import Any

import torch

from poise import optimizers
from poise._C import Error

_LR = 1e-3  # DeepSpeed's and torch's


def make(kind: str, params: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """Raises Error on a type or a setting without a kernel.

    Args:
      kind: optimizer.type.
      params: optimizer.params.
      parameters: tensors, or groups of them.
    """
    name = kind.lower()
    params = {k: v for k, v in params.items() if v is not None}
    decoupled = params.pop("adam_w_mode", True)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    try:
        if name in ("adam", "fusedadam", "deepspeedcpuadam", "cpuadam"):
            made = torch.optim.AdamW if decoupled else torch.optim.Adam
            return made(parameters, **{"lr": _LR, "weight_decay": 0.0, **params})
        if name == "adamw":
            return torch.optim.AdamW(parameters, **{"lr": _LR, "weight_decay": 0.0, **params})
        if name in ("lamb", "fusedlamb"):
            limits = {"min_coeff": 0.01, "max_coeff": 10.0}  # DeepSpeed's
            return optimizers.Lamb(parameters, **{"lr": _LR, "eps": 1e-8, **limits, **params})
        if name in ("lion", "fusedlion", "deepspeedcpulion"):
            return optimizers.Lion(parameters, **{"lr": 1e-4, **params})
        if name == "sgd":
            return torch.optim.SGD(parameters, **{"lr": _LR, **params})
    except TypeError as error:
        raise Error(f"[deepspeed] optimizer.params do not fit {kind}: {error}") from None
    raise Error(
        f"[deepspeed] optimizer.type is {kind}; poise has kernels for Adam, AdamW, Lamb, Lion and SGD"
    )
