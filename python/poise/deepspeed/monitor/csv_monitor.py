"""`from deepspeed.monitor.csv_monitor import csvMonitor`, of poise."""

from __future__ import annotations

from poise.deepspeed.monitor.monitor import csvMonitor

__all__ = ["csvMonitor"]
