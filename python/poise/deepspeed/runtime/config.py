"""What scripts read of a DeepSpeed file themselves: its monitors."""

from __future__ import annotations

from typing import Any

from poise.deepspeed import config as settings
from poise.deepspeed.monitor.config import DeepSpeedMonitorConfig


class DeepSpeedConfig:
    """A file, or a dictionary, as initialize() reads it.

    Attributes:
      monitor_config: for MonitorMaster.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self.monitor_config: DeepSpeedMonitorConfig = settings.read(config, 1).monitor
