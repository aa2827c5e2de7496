"""What scripts import from `deepspeed.monitor`: where an engine's figures and a script's own events go."""

from __future__ import annotations

from poise.deepspeed.monitor import config, monitor
from poise.deepspeed.monitor.monitor import MonitorMaster

__all__ = ["MonitorMaster", "config", "monitor"]
