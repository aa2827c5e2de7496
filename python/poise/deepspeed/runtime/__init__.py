"""What scripts import from `deepspeed.runtime`: its learning rate schedules, and a file's settings."""

from __future__ import annotations

from poise.deepspeed.runtime import config, lr_schedules

__all__ = ["config", "lr_schedules"]
