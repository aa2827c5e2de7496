"""`from deepspeed.monitor.wandb import WandbMonitor`, of poise."""

from __future__ import annotations

from poise.deepspeed.monitor.monitor import WandbMonitor

__all__ = ["WandbMonitor"]
