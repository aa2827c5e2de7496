"""The settings of a run: a dictionary, JSON text, a file or a Config become one Config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from poise._C import Config, Error

ConfigLike = Config | Mapping | str | os.PathLike | None


def read_config(config: ConfigLike) -> Config:
    """Reads any of the forms that poise.Engine takes.

    Args:
      config: None (all defaults), a dictionary, a path of a JSON file, JSON text, or a Config.
    """
    if config is None:
        return Config.from_json("{}")
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return Config.from_json(_to_json(config))
    if isinstance(config, str) and config.lstrip().startswith(("{", "/*", "//")):
        return Config.from_json(config)
    if isinstance(config, (str, os.PathLike)):
        return Config.from_json_file(os.fspath(config))
    raise Error(
        f"[config] cannot read settings from {type(config).__name__}; "
        "give a dictionary, a path, JSON text or a poise.Config"
    )


def settings_of(config: Config) -> dict[str, Any]:
    """Every key with its value."""
    return json.loads(config.to_json())


def keeps_whole(settings: Mapping[str, Any]) -> bool:
    """Whether parameters stay whole on the device. If not, the engine moves the model there, unit by
    unit: it may be larger than a GPU."""
    zero, offload = settings.get("zero", {}), settings.get("offload", {})
    return zero.get("stage", 0) != 3 and offload.get("parameters", "none") == "none"


def _to_json(settings: Mapping) -> str:
    try:
        return json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Error(
            f"[config] a setting cannot be written as JSON: {error}; "
            "use numbers, strings, true/false, lists and dictionaries"
        ) from error
