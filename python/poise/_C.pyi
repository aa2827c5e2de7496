"""
The C++ core of poise. Use the package poise; this module follows it without notice.
"""

from __future__ import annotations

class Bug(RuntimeError): ...
class Error(RuntimeError): ...

import torch
import typing

__all__: list[str] = [
    "Bug",
    "Error",
    "OptimizerFlats",
    "cpu_isa",
    "log_write",
    "optimizer_stage",
    "set_log_level",
    "stream_pass",
]

class OptimizerFlats:
    def __init__(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moment1: torch.Tensor,
        moment2: torch.Tensor,
        low: torch.Tensor | None = None,
    ) -> None: ...

def cpu_isa() -> str:
    """
    Instruction set of the CPU kernels (POISE_CPU_ISA forces one).
    """

def log_write(level: typing.SupportsInt, line: str) -> None:
    """
    Writes one line to the runtime's log (0 debug, 1 info, 2 warning, 3 error).
    """

def optimizer_stage(
    flats: OptimizerFlats,
    ranges: torch.Tensor,
    step: typing.SupportsInt,
    lr: typing.SupportsFloat,
    beta1: typing.SupportsFloat,
    beta2: typing.SupportsFloat,
    eps: typing.SupportsFloat,
    weight_decay: typing.SupportsFloat,
    max_norm: typing.SupportsFloat,
    scale: typing.SupportsFloat = 1.0,
) -> float:
    """
    Norm, finite check, clip and AdamW over the segments [begin, end) in the rows of `ranges` (int64, n x 2); returns the norm.
    """

def set_log_level(level: str) -> None:
    """
    Drops log lines below level: debug, info, warning or error.
    """

def stream_pass(flats: OptimizerFlats) -> int:
    """
    The memory traffic of optimizer_stage without its arithmetic.
    """
