"""`deepspeed.checkpointing`, of poise: activations that are computed again in backward."""

from __future__ import annotations

from typing import Any

from poise.checkpointing import recompute as checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "reset"]


def configure(mpu_: Any = None, deepspeed_config: Any = None, **_: Any) -> None:
    """Accepted: what a region keeps are its inputs, which need no arena and no marks. That they wait
    on the host is activation_checkpointing.cpu_checkpointing of initialize()'s settings."""


def is_configured() -> bool:
    """Always: there is nothing that has to be."""
    return True


def reset() -> None:
    """Nothing: no arena is kept from one forward to the next."""
