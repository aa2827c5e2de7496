"""A Trainer's checkpoints: folders checkpoint-N in output_dir, each whole or not there, to resume from.

Besides the engine's state a folder has trainer_state.json and, for models that have save_pretrained,
the model's own files, so that from_pretrained opens it.
"""

from __future__ import annotations

import json
import re
import signal
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
from poise.signals import AskedOfRanks, Interrupted, Signals
from poise.training_arguments import TrainingArguments

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
    """

    def __init__(
        self,
        args: TrainingArguments,
        engine: Engine,
        windows: WindowIterator,
        log: RunLog,
        group: Group,
        signals: Signals,
    ) -> None:
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
        self._log.go_on(json.loads(loaded.user["trainer"]))
        self._saved = self._log.state.global_step
        self._log.last_save = loaded.path
        config = self._args.to_config(self._log.state.max_steps)
        self._engine.set_schedule(config, self._log.earlier[0])
        self._log.note(f"resumed from {loaded.path} after update {self._saved}")

    def before_window(self) -> None:
        """Notes where the next window begins. An epoch's end shows when that has been read, and a signal
        may come within it: their checkpoints begin before."""
        if self._saves:
            self._position, self._random = self._windows.state_dict(), generators.Snapshot()
            self._buffers = [(b, b.clone()) for b in self._may_change()]

    def _may_change(self) -> list[torch.Tensor]:
        """Running statistics. Weights that quantised models keep as buffers are large, and stay as they
        are: of large ones only those count that earlier windows have changed."""
        buffers = lasting_buffers(self._engine.model)
        for number, buffer in enumerate(buffers):
            if self._versions.setdefault(number, buffer._version) != buffer._version:
                self._changed.add(number)
        return [b for n, b in enumerate(buffers) if b.nbytes <= SMALL_BUFFER or n in self._changed]

    def end_is_asked(self) -> bool:
        """Whether a signal has asked some rank for a checkpoint and the end: between micro-batches."""
        return self._saves and self._asked.now()

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
            self._end("")

    def dropped_by_signal(self) -> bool:
        """Whether a signal, on some rank, is why the window was dropped."""
        return self._saves and self._asked.now(at_once=True)

    def after_dropped_window(self) -> None:
        """A signal came within it: all that it has drawn and counted comes again."""
        self._random.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._save()
        self._end(" the open window was dropped,")

    def _end(self, how: str) -> None:
        self._engine.finish_save()
        log, number = self._log, self._signals.save_asked
        log.note(
            f"ended by a signal;{how} saved after update {log.state.global_step} in {log.last_save}; "
            "goes on from there with resume_from_checkpoint=True"
        )
        self._group.barrier("the end of the run")  # its store goes with rank 0
        raise Interrupted(number if number is not None else signal.SIGTERM)

    def after_epoch(self) -> None:
        if self._args.save_strategy != "epoch":
            return
        now = generators.Snapshot()
        if self._random is not None:
            self._random.restore()
        self._save()
        now.restore()

    def finish(self) -> None:
        """The end of the run: what is still being written is waited for."""
        self._engine.finish_save()

    def _save(self) -> None:
        step = self._log.state.global_step
        if step == self._saved:
            return
        self._saved = step
        model_files = ModelFiles(self._engine, self._group.rank == 0)

        def extra(folder: str) -> None:
            model_files.write(folder)
            state = json.dumps(self._log.state_file(), indent=2)
            (Path(folder) / STATE_FILE).write_text(state + "\n")

        position = self._position or self._windows.state_dict()
        self._log.last_save = self._engine.save(
            self._folder,
            name=f"checkpoint-{step}",
            cursor=_cursor(position),
            user={
                "trainer": json.dumps(self._log.kept()),
                "data": json.dumps(position),
            },
            own=generators.own_texts(),
            total_limit=self._args.save_total_limit or 0,
            extra=extra,
        )
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
