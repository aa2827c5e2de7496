"""What TrainingArguments.report_to asks for: trackers of poise's own, and for every other service transformers' own
callback."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from poise import trackers
from poise._C import Error

if TYPE_CHECKING:
    from poise.training_arguments import TrainingArguments

OURS: dict[str, Callable[[], trackers.Tracker]] = {
    "tensorboard": trackers.TensorBoard,
    "wandb": trackers.Wandb,
    "comet_ml": trackers.Comet,
}
MODULES = {"tensorboard": ("tensorboard", "tensorboardX")}  # where a service has another name, too
THEIRS = (
    "azure_ml", "clearml", "codecarbon", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow", "neptune",
    "swanlab", "trackio",
)  # fmt: skip


def listeners(args: TrainingArguments) -> list[Any]:
    """Callbacks; raises Error where a service is not installed."""
    asked = args.report_to
    names = [asked] if isinstance(asked, str) else list(asked or ())
    known = (*OURS, *THEIRS, "none", "all")
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, 1, 0.0)[0]
            raise Error(f"[trainer] report_to has {name!r}; did you mean {nearest}?")
    names = _installed() if "all" in names else [name for name in names if name != "none"]
    return [OURS[name]() if name in OURS else _theirs(name) for name in dict.fromkeys(names)]


def _installed() -> list[str]:
    """All services that are there; of those of transformers, where the script uses transformers."""
    found = [
        name
        for name in OURS
        if any(importlib.util.find_spec(module) for module in MODULES.get(name, (name,)))
    ]
    if "transformers" in sys.modules:
        from transformers.integrations import get_available_reporting_integrations

        found += [name for name in get_available_reporting_integrations() if name in THEIRS]
    return found


def _theirs(name: str) -> Any:
    try:
        from transformers.integrations import get_reporting_integration_callbacks

        [kind] = get_reporting_integration_callbacks([name])
        callback = kind()
    except Exception as error:  # each service has its own way to say that it is not there
        raise Error(
            f"[trainer] report_to {name} starts the callback of transformers for it, which says: {error}; "
            f"install what it needs, or leave {name} out (metrics.jsonl has every line, `poise report` draws "
            "them)"
        ) from error
    callback.on_log = _with_flat_lines(callback.on_log)
    return callback


def _with_flat_lines(on_log: Callable[..., Any]) -> Callable[..., Any]:
    """Lines have numbers and texts alone: what poise nests in them (accounts of memory) gets names with a
    slash."""

    def of_flat_line(args: Any, state: Any, control: Any, logs: Any = None, **details: Any) -> Any:
        return on_log(args, state, control, logs=dict(trackers.flat(logs or {})), **details)

    return of_flat_line
