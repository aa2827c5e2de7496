"""`from deepspeed.ops.adam import FusedAdam`, of poise."""

from __future__ import annotations

from poise.ops.adam import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
