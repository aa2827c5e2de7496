"""`from deepspeed.ops.lion import FusedLion`, of poise."""

from __future__ import annotations

from poise.ops.lion import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
