"""`import deepspeed.comm as dist`, of poise: torch.distributed's functions too."""

from __future__ import annotations

from typing import Any

from poise import comm
from poise.comm import (
    barrier,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    is_initialized,
)
from poise.deepspeed.launch import init_distributed

__all__ = [
    "barrier",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_initialized",
]


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
