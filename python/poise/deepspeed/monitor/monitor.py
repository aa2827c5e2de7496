"""Monitors: events, which are (label, value, step), as TensorBoard's files, to wandb, or as lines of CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poise import ranks, trackers
from poise._C import Error
from poise.deepspeed.monitor.config import (
    CSVConfig,
    DeepSpeedMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)

Event = tuple[str, Any, int]


class Monitor:
    """Of rank 0 alone; on the others it is made and writes nothing."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = bool(monitor_config.enabled) and ranks.here().rank == 0

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Every event at once, so that a run that dies has left what it wrote."""
        if not self.enabled:
            return
        for label, value, step in event_list:
            self._write(label, float(value), int(step))

    def _write(self, label: str, value: float, step: int) -> None:
        raise NotImplementedError


class TensorBoardMonitor(Monitor):
    def __init__(self, tensorboard_config: TensorBoardConfig) -> None:
        super().__init__(tensorboard_config)
        if self.enabled:
            folder = _folder_of(tensorboard_config)
            self._files = trackers.EventFiles(folder, asked="tensorboard.enabled")
            self.summary_writer = self._files.writer

    def _write(self, label: str, value: float, step: int) -> None:
        self._files.log({label: value}, step)


class WandbMonitor(Monitor):
    def __init__(self, wandb_config: WandbConfig) -> None:
        super().__init__(wandb_config)
        if self.enabled:
            wandb = trackers.imported("wandb", "wandb", asked="wandb.enabled")
            self._run = wandb.init(
                project=wandb_config.project, group=wandb_config.group, entity=wandb_config.team
            )

    def _write(self, label: str, value: float, step: int) -> None:
        self._run.log({label: value}, step=step)


class csvMonitor(Monitor):
    """A label's file is its name with _ for / and spaces."""

    def __init__(self, csv_config: CSVConfig) -> None:
        super().__init__(csv_config)
        self.log_dir = str(_folder_of(csv_config)) if self.enabled else None

    def _write(self, label: str, value: float, step: int) -> None:
        path = Path(self.log_dir) / f"{label.replace('/', '_').replace(' ', '_')}.csv"
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(["step", label.rsplit("/", 1)[-1]])
            writer.writerow([step, value])


class MonitorMaster(Monitor):
    """All that a file has switched on.

    Args:
      monitor_config: of poise.deepspeed.monitor.config.get_monitor_config(), or
        poise.deepspeed.runtime.config.DeepSpeedConfig(...).monitor_config.
    """

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        if not isinstance(monitor_config, DeepSpeedMonitorConfig):
            raise Error(
                f"[deepspeed] MonitorMaster got {type(monitor_config).__name__}; give "
                "deepspeed.monitor.config.get_monitor_config(a dictionary)"
            )
        super().__init__(monitor_config)
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for one in (self.tb_monitor, self.wandb_monitor, self.csv_monitor):
            one.write_events(event_list)


def _folder_of(config: TensorBoardConfig | CSVConfig) -> Path:
    folder = Path(config.output_path) / config.job_name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
