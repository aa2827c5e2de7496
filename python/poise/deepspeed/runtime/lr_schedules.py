"""`from deepspeed.runtime.lr_schedules import WarmupLR`, of poise."""

from __future__ import annotations

from poise.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
