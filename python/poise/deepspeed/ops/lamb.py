"""`from deepspeed.ops.lamb import FusedLamb`, of poise."""

from __future__ import annotations

from poise.ops.lamb import FusedLamb

__all__ = ["FusedLamb"]
