"""What a DeepSpeed file says about monitors: its sections tensorboard, wandb and csv_monitor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from poise._C import Error


@dataclasses.dataclass
class TensorBoardConfig:
    """Event files in output_path/job_name."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclasses.dataclass
class CSVConfig:
    """One file for each label in output_path/job_name."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclasses.dataclass
class WandbConfig:
    """A run that is begun by the first rank."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclasses.dataclass
class DeepSpeedMonitorConfig:
    """The sections; what is left out has DeepSpeed's own values."""

    tensorboard: TensorBoardConfig = dataclasses.field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = dataclasses.field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = dataclasses.field(default_factory=CSVConfig)

    @property
    def enabled(self) -> bool:
        return self.tensorboard.enabled or self.wandb.enabled or self.csv_monitor.enabled


SECTIONS = {"tensorboard": TensorBoardConfig, "wandb": WandbConfig, "csv_monitor": CSVConfig}


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Of a whole file's dictionary, or of one with these sections alone."""
    made = DeepSpeedMonitorConfig()
    for section, kind in SECTIONS.items():
        given = param_dict.get(section) or {}
        known = [field.name for field in dataclasses.fields(kind)]
        for name in given:
            if name not in known:
                raise Error(f"[deepspeed] {section} has no {name}; use {', '.join(known)}")
        values = {name: value for name, value in given.items() if value is not None}
        setattr(made, section, kind(**values))
    return made
