"""`from deepspeed.monitor.tensorboard import TensorBoardMonitor`, of poise."""

from __future__ import annotations

from poise.deepspeed.monitor.monitor import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
