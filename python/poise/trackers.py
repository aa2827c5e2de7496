"""Where a Trainer's lines go besides metrics.jsonl: TensorBoard, wandb, Comet, or anything that has
`log(dict, step=)`. What report_to asks for: poise.report_to."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from poise._C import Error
from poise.callbacks import TrainerCallback, made

logger = logging.getLogger("poise")


class Tracker(TrainerCallback):
    """Gives every line's numbers to `run.log(numbers, step=update)`, on the first rank.

    Names are those of transformers' dashboards: train/loss, eval/loss, test/loss; memory by account is
    train/accounts/<account>.

    Args:
      run: a wandb run, or any object with that method. Such an object in a Trainer's callbacks= is
        made a Tracker.
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    def on_log(self, args, state, control, logs=None, **details) -> None:
        if state.is_world_process_zero and (numbers := numbers_of(logs or {})):
            self._begin(args, state)
            self.run.log(numbers, step=state.global_step)

    def _begin(self, args: Any, state: Any) -> None:
        """Makes what to log to, on the first rank, where there is none yet."""


class TensorBoard(Tracker):
    """Writes event files that `tensorboard --logdir` shows, from the beginning of each train().

    A resumed run goes on with the same curves; what was written after its checkpoint is hidden.

    Args:
      folder: of the files; None: logging_dir, else the environment's TENSORBOARD_LOGGING_DIR, else
        output_dir/runs.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(None)
        self._folder = folder
        _writer_class("report_to tensorboard")  # now, not when a run has begun

    def on_train_begin(self, args, state, control, **details) -> None:
        self.on_train_end(args, state, control)  # of one that an error ended
        if state.is_world_process_zero:
            self._begin(args, state)

    def on_log(self, args, state, control, logs=None, **details) -> None:
        in_train = self.run is not None
        super().on_log(args, state, control, logs, **details)
        if not in_train:  # evaluate() alone
            self.on_train_end(args, state, control)

    def on_train_end(self, args, state, control, **details) -> None:
        if self.run is not None:
            self.run.close()
            self.run = None

    def _begin(self, args: Any, state: Any) -> None:
        if self.run is not None:
            return
        folder = self._folder or getattr(args, "logging_dir", None)
        folder = folder or os.environ.get("TENSORBOARD_LOGGING_DIR")
        folder = Path(folder) if folder else Path(args.output_dir) / "runs"
        self.run = EventFiles(folder, state.global_step + 1)


class Wandb(Tracker):
    """Lines go to the run of the module wandb that is open, else to one begun here.

    Its project is that of the environment's WANDB_PROJECT, else `project` of the arguments; its name
    is run_name. The run stays open: what comes after train() may log to it.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._module = imported("wandb", "wandb", "report_to wandb")

    def on_train_begin(self, args, state, control, **details) -> None:
        if state.is_world_process_zero:
            self.run = None  # the one that is open now
            self._begin(args, state)

    def _begin(self, args: Any, state: Any) -> None:
        self.run = self.run or self._module.run
        if self.run is None:
            project = os.environ.get("WANDB_PROJECT") or getattr(args, "project", None)
            self.run = self._module.init(
                project=project or "poise",
                name=getattr(args, "run_name", None),
                config=args.to_sanitized_dict(),
            )


class Comet(Tracker):
    """Lines go to the experiment of the module comet_ml that is running, else to one begun here.

    The environment says which, as it does to transformers: COMET_MODE (get, create, get_or_create),
    COMET_EXPERIMENT_KEY, COMET_PROJECT_NAME; its name is run_name. It stays open.
    """

    MODES = ("get", "create", "get_or_create")

    def __init__(self) -> None:
        super().__init__(None)
        self._module = imported("comet_ml", "comet_ml", "report_to comet_ml")
        mode = os.environ.get("COMET_MODE", "").lower()
        if mode and mode not in self.MODES:
            raise Error(
                f"[trainer] COMET_MODE is {mode!r}; set it to {', '.join(self.MODES)}, or take it away"
            )
        self._mode = mode or None

    def on_train_begin(self, args, state, control, **details) -> None:
        if state.is_world_process_zero:
            self._begin(args, state)

    def _begin(self, args: Any, state: Any) -> None:
        if self.run is None:
            named = self._module.ExperimentConfig(name=getattr(args, "run_name", None))
            experiment = self._module.start(mode=self._mode, experiment_config=named)
            experiment.log_parameters(args.to_sanitized_dict())
            self.run = _Experiment(experiment)


class _Experiment:
    """Comet's as a thing to log to."""

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._experiment.log_metrics(numbers, step=step)


class EventFiles:
    """A SummaryWriter as a thing to log to.

    Args:
      folder: of the files.
      purge_step: what was written there from this step on is hidden; None: nothing.
      asked: what asks for it, for the error where nothing can write such files.
    """

    def __init__(
        self,
        folder: str | Path,
        purge_step: int | None = None,
        asked: str = "report_to tensorboard",
    ) -> None:
        self.writer = _writer_class(asked)(str(folder), purge_step=purge_step)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def listener(callback: Any) -> Any:
    """A callback of a class, or the object as it is; what can only log is made a Tracker."""
    one = made(callback)
    events = any(name.startswith("on_") for name in dir(one))
    return Tracker(one) if callable(getattr(one, "log", None)) and not events else one


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by the names of dashboards."""
    found = {}
    for name, value in flat(line):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            found[_shown_name(name)] = value
    return found


def flat(line: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    """A line's entries, those of a dictionary in it by names with a slash."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}/")
        else:
            yield f"{before}{name}", value


def _shown_name(name: str) -> str:
    for split in ("eval", "test"):
        if name.startswith(f"{split}_"):
            return f"{split}/{name[len(split) + 1 :]}"
    return f"train/{name}"


def _writer_class(asked: str) -> Any:
    """torch's writer, which needs tensorboard, or that of tensorboardX."""
    if importlib.util.find_spec("tensorboard") is not None:
        return imported("torch.utils.tensorboard", "tensorboard", asked).SummaryWriter
    if importlib.util.find_spec("tensorboardX") is not None:
        return imported("tensorboardX", "tensorboard", asked).SummaryWriter
    raise _missing("tensorboard", asked)


def imported(module: str, name: str, asked: str) -> Any:
    """The module; where there is none, an Error that names what asked for it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(name, asked) from error


def _missing(name: str, asked: str) -> Error:
    room = "trainer" if asked.startswith("report_to") else "deepspeed"
    return Error(
        f"[{room}] {asked}, but {name} cannot be imported here: pip install {name}, or leave {asked} out "
        "(of a Trainer metrics.jsonl has every line, `poise report` draws them)"
    )
