"""What scripts import from `deepspeed.runtime`: its learning rate schedules."""

from __future__ import annotations

from poise.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]
