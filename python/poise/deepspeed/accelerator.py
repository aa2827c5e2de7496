"""`from deepspeed.accelerator import get_accelerator`, of poise."""

from __future__ import annotations

from poise.accelerator import Accelerator, get_accelerator

__all__ = ["Accelerator", "get_accelerator"]
