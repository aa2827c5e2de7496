"""A Trainer's checkpoints: folders checkpoint-N in output_dir, each whole or not there, to resume from.

Besides the engine's state a folder has trainer_state.json and, for models that have save_pretrained,
the model's own files, so that from_pretrained opens it.
"""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from poise import _C, generators, whole_state
from poise._C import Error, Group, WindowDropped
from poise.data import WindowIterator
from poise.engine import Engine
from poise.model_view import lasting_buffers, plain_name
from poise.run_log import RunLog
from poise.schedule_arguments import updates_of
from poise.signals import AgreedEnd, AskedOfRanks, EvaluationGivenUp, Interrupted, Signals
from poise.trainer_optimizer import TorchOptimizer
from poise.training_arguments import TrainingArguments

logger = logging.getLogger("poise")

STATE_FILE = "trainer_state.json"
SMALL_BUFFER = 1 << 20  # bytes


class TrainerSaves:
    """When checkpoints are made, what is in them, how a run goes on from one.

    Args:
      args: of the Trainer.
      engine: whose state is saved.
      windows: whose position is.
      log: whose counters and lines are.
      group: all ranks; all make the same calls.
      signals: of this process.
      optimizer: of torch, and its scheduler; None: the engine's own.
    """

    def __init__(
        self,
        args: TrainingArguments,
        engine: Engine,
        windows: WindowIterator,
        log: RunLog,
        group: Group,
        signals: Signals,
        optimizer: TorchOptimizer | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._args, self._engine, self._windows = args, engine, windows
        self._log, self._group, self._signals = log, group, signals
        self._folder, self._saves = Path(args.output_dir), args.save_strategy != "no"
        self._every = max(1, updates_of(args.save_steps, log.state.max_steps))
        self._saved: int | None = None  # updates at the last checkpoint
        # Where the next window begins, while it has been read and not trained on.
        self._position: dict[str, Any] | None = None
        self._random: generators.Snapshot | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._asked = AskedOfRanks(signals, group) if self._saves else None
        self._versions: dict[int, int] = {}  # of buffers, by place, as the first window found them
        self._changed: set[int] = set()
        self._not_copied: list[tuple[torch.Tensor, int]] = []  # with their versions
        self._is_first_window = False
        self._resumed: generators.Snapshot | None = None  # of the checkpoint, for the first window
        self._left_open: int | None = None  # the epoch that it is in, or at the end of
        self.owes_evaluation = False  # the checkpoint has none of its update: it was given up
        self._gave_up = False

    def resume(self, wanted: str | bool | None) -> None:
        """From a checkpoint; True: the latest of output_dir. Before the first window."""
        if not wanted:
            return
        path = str(self._folder) if wanted is True else str(wanted)
        loaded = self._engine.load(path)
        if "trainer" not in loaded.user:
            raise Error(
                f"[trainer] {loaded.path} is no checkpoint of a Trainer; give one, or load it by "
                "poise.Engine"
            )
        self._windows.load_state_dict(json.loads(loaded.user["data"]))
        generators.take_texts(loaded.own)
        self._resumed = generators.Snapshot()
        kept = json.loads(loaded.user["trainer"])
        self._log.go_on(kept)
        self.owes_evaluation = kept.get("owes_evaluation", False)
        self._left_open = None if kept.get("epoch_ended", True) else kept["epoch"]
        self._saved = self._log.state.global_step
        self._log.last_save = loaded.path
        config = self._args.to_config(self._log.state.max_steps)
        self._engine.set_schedule(config, self._log.earlier[0])
        if self._optimizer is not None:
            self._optimizer.resume(self._engine.updates - self._log.earlier[0], loaded.user)
        self._log.note(f"resumed from {loaded.path} after update {self._saved}")

    def before_window(self) -> None:
        """Notes where the next window begins. An epoch's end shows when that has been read, and a signal
        may come within it: their checkpoints begin before. A resumed run's first window begins with the
        checkpoint's random numbers, whatever callbacks have drawn since."""
        if self._resumed is not None:
            self._resumed.restore()
            self._resumed = None
        if self._saves:
            self._position, self._random = self._windows.state_dict(), generators.Snapshot()
            self._copy_buffers()
        if self._gave_up:
            self._save()
            self._end()

    def epoch_left_open(self, of_window: int | None, epoch: int | None) -> int | None:
        """Which epoch a window of another one, or the run's end (None), ends: the run's, or the one at
        whose last update the checkpoint was made; None: none."""
        left, self._left_open = self._left_open, None
        return epoch if epoch is not None else None if left == of_window else left

    def _copy_buffers(self) -> None:
        """Running statistics, to go back to. Weights that quantised models keep as buffers are large, and
        stay as they are: of large ones those are copied that earlier windows have changed."""
        self._is_first_window = not self._versions
        self._buffers, self._not_copied = [], []
        for number, buffer in enumerate(lasting_buffers(self._engine.model)):
            if self._versions.setdefault(number, buffer._version) != buffer._version:
                self._changed.add(number)
            if buffer.nbytes <= SMALL_BUFFER or number in self._changed:
                self._buffers.append((buffer, buffer.clone()))
            else:
                self._not_copied.append((buffer, buffer._version))

    def _changed_without_copy(self) -> int:
        return sum(buffer._version != version for buffer, version in self._not_copied)

    def _can_drop(self) -> bool:
        """Whether the open window can be dropped. Of large buffers the first one shows whether they change;
        a window in which one first does is trained to its end."""
        if self._is_first_window and self._not_copied:
            return False
        return self._changed_without_copy() == 0

    def end_is_asked(self) -> bool:
        """Whether a signal has asked some rank for a checkpoint and the end: between micro-batches."""
        return self._saves and self._can_drop() and self._asked.now()

    def between_batches(self) -> Callable[[], None]:
        """What an evaluation calls before each of its batches: raises EvaluationGivenUp, on all ranks."""
        if not self._saves:
            return lambda: None
        end = AgreedEnd(self._signals, self._group)

        def give_up_if_asked() -> None:
            if end.now():
                raise EvaluationGivenUp

        return give_up_if_asked

    def evaluation_was_given_up(self) -> None:
        """The checkpoint of where the run is says so, and is its end."""
        self._gave_up = True
        self._log.control.should_save = self._log.control.ended_by_signal = True

    def drop_if_asked(self) -> None:
        """The same in a loss of engine.step(window)."""
        if self.end_is_asked():
            raise WindowDropped

    def after_update(self) -> None:
        """Saves where a checkpoint is due, or was asked for by a callback or a signal on any rank."""
        self._position = self._random = None
        self._buffers = []
        log, step = self._log, self._log.state.global_step
        if self._args.save_strategy == "steps" and (
            step % self._every == 0 or step >= log.state.max_steps
        ):
            log.control.should_save = True
        if self._signals.save_asked is not None:
            log.control.should_save = log.control.ended_by_signal = True
        if log.saving_due():
            self._save()
        if log.control.ended_by_signal:
            self._end()

    def dropped_by_signal(self) -> bool:
        """Whether a signal, on some rank, is why the window was dropped."""
        return self._saves and self._asked.now(at_once=True)

    def after_dropped_window(self) -> None:
        """A signal came within it: all that it has drawn and counted comes again."""
        self._random.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        if changed := self._changed_without_copy():  # another rank dropped it
            logger.warning(
                "[trainer] %d large buffers were first changed by the window that was dropped, and are "
                "saved as it left them",
                changed,
            )
        self._save()
        self._end(" the open window was dropped,")

    def _end(self, how: str = "") -> None:
        self._engine.finish_save()
        how = " the evaluation was given up," if self._gave_up else how
        log, number = self._log, self._signals.save_asked
        log.note(
            f"ended by a signal;{how} saved after update {log.state.global_step} in {log.last_save}; "
            "goes on from there with resume_from_checkpoint=True"
        )
        self._group.barrier("the end of the run")  # its store goes with rank 0
        raise Interrupted(number if number is not None else signal.SIGTERM)

    def after_epoch(self) -> None:
        if self._args.save_strategy != "epoch" and not self._gave_up:
            return
        with generators.untouched():
            if self._random is not None:
                self._random.restore()
            self._save(epoch_ended=True)
        if self._gave_up:
            self._end()

    def finish(self) -> None:
        """The end of the run: what is still being written is waited for."""
        self._engine.finish_save()

    def _save(self, epoch_ended: bool = False) -> None:
        step = self._log.state.global_step
        if step == self._saved and not self._gave_up:
            return
        self._saved = step
        model_files = ModelFiles(self._engine, self._group.rank == 0)

        def extra(folder: str) -> None:
            model_files.write(folder)
            state = json.dumps(self._log.state_file(), indent=2)
            (Path(folder) / STATE_FILE).write_text(state + "\n")

        position = self._position or self._windows.state_dict()
        marks = {"owes_evaluation": self._gave_up, "epoch_ended": epoch_ended}
        self._log.last_save = self._engine.save(
            self._folder,
            name=f"checkpoint-{step}",
            cursor=_cursor(position),
            user={
                "trainer": json.dumps(self._log.kept() | marks),
                "data": json.dumps(position),
                **(self._optimizer.kept() if self._optimizer is not None else {}),
            },
            own=generators.own_texts(),
            total_limit=self._args.save_total_limit or 0,
            extra=extra,
        )
        with generators.untouched():
            self._log.event("on_save")


def _cursor(position: dict[str, Any]) -> int | None:
    """The global sample index; None where data has no length."""
    if position["unit"] != "samples":
        return None
    return position["epoch"] * position["size"] + position["offset"]


class ModelFiles:
    """What the model's save_pretrained writes, where it has one: whole tensors, on the first rank."""

    def __init__(self, engine: Engine, first: bool) -> None:
        self._model, self._values = engine.model, None
        if callable(getattr(self._model, "save_pretrained", None)):
            values = whole_copies(self._model, engine)
            self._values = values if first else None

    def write(self, folder: str) -> None:
        if self._values is not None:
            self._model.save_pretrained(folder, state_dict=self._values)
            self._values = None


def whole_copies(model: torch.nn.Module, engine: Engine | None) -> dict[str, torch.Tensor]:
    """The state_dict on the CPU, by the names of the model before it was compiled, ties kept; all
    ranks of the engine, the first one gets it."""
    if engine is None:
        values = whole_state.copied(dict(model.state_dict()), device="cpu")
    else:
        values = engine.state_dict(rank=0, device="cpu")
    return {plain_name(name): value for name, value in values.items()}


def last_checkpoint(folder: str | Path) -> str | None:
    """The latest whole checkpoint of an output_dir; None: there is none."""
    found = _C.find_save(str(folder))
    return found if found and re.fullmatch(r"checkpoint-\d+", Path(found).name) else None


def write_model(values: dict[str, torch.Tensor], path: Path) -> None:
    """A state_dict as one safetensors file, through a file beside it: whole or not there."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise Error("[trainer] save_model needs safetensors: pip install safetensors") from None
    beside = path.with_name(path.name + ".part")
    # The format has no ties: each name gets values of its own.
    save_file({name: value.contiguous().clone() for name, value in values.items()}, beside)
    beside.replace(path)
