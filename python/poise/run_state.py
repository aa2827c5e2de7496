"""The saves of `poise train` of a model of Python: the twin of src/cli/run_state.cpp."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from poise import _C, generators
from poise._C import Error
from poise.engine import Engine
from poise.run_data import RunData
from poise.run_report import RunReport
from poise.signals import SAVE_FIRST, Interrupted

logger = logging.getLogger("poise")


class RunState:
    """When saves are made, what they hold besides the engine's own, how a run goes on from one."""

    def __init__(
        self, settings: dict[str, Any], engine: Engine, data: RunData, report: RunReport
    ) -> None:
        self._policy, self._engine, self._data, self._report = (
            settings["state"],
            engine,
            data,
            report,
        )
        self._every = self._policy["save_every"]
        self._max_updates = settings["train"]["max_updates"]
        self._folder = Path(settings["train"]["output_dir"]) / "state"
        self._saved = -1  # updates at the last save
        self._last: dict[str, Any] = {}  # its arguments
        self._best: float | None = None  # validation loss
        self._is_best = False  # the last one, and not saved yet
        self._path = ""  # of the last save
        # A validation that a signal ends is made by the run that goes on from the save.
        self._validates = self.owes_validation = False
        self._open: tuple[int, generators.Snapshot] | None = None  # where the open window began

    def resume(self) -> None:
        """As state.resume says, before the first window."""
        path = self._policy["resume"]
        if path == "none":
            return
        if path == "auto":
            path = _C.find_save(str(self._folder))
            if not path:
                self._report.begin_anew()
                self._report.note(f"  no save in {self._folder}: a new run")
                return
        loaded = self._engine.load(path)
        identity = json.dumps(self._data.identity)
        if loaded.cursor is None or loaded.user.get("data") != identity:
            raise Error(
                f"[cli] {loaded.path} was made with other data: {loaded.user.get('data', '')}, and "
                f"this run has {identity}; resume with the same data and seed"
            )
        self._report.go_on(loaded.user.get("report", ""))
        if best := loaded.user.get("best"):
            self._best = float(best)
        self.owes_validation = "owes_validation" in loaded.user
        if self._policy["resume"] == "auto":  # else the save may lie elsewhere
            self._path = loaded.path
        self._data.windows.seek(loaded.cursor)
        generators.take_texts(loaded.own)
        self._saved = self._report.updates
        self._report.note(f"  resumed from {loaded.path} after update {self._report.updates}")

    def rehearse(self) -> None:
        """Before the first window: what a save would take, and whether it can be made."""
        if self._every == 0 or not self._policy["rehearse"]:
            return
        save = self._engine.rehearse_save(self._folder)
        self._report.note(
            f"  a save takes {_C.format_bytes(save.bytes)} and {save.seconds:.2f} s; "
            f"{_C.format_bytes(save.free_bytes)} are free in {self._folder}"
        )
        saves = 1 + self._policy["keep_best"]
        saves += self._policy["save_total_limit"] or self._max_updates // self._every
        if save.bytes * saves > save.free_bytes:
            logger.warning(
                "the %d saves of this run take %s, more than is free; free some space or set "
                "state.save_total_limit",
                saves,
                _C.format_bytes(save.bytes * saves),
            )

    def open_window(self) -> None:
        if self._every > 0:
            self._open = (self._data.windows.cursor, generators.Snapshot())

    def close_window(self) -> None:
        self._open = None

    def begin_validation(self) -> None:
        self._validates = True

    def validated(self, loss: float) -> None:
        self._validates = False
        if self._policy["keep_best"] and loss < (math.inf if self._best is None else self._best):
            self._best, self._is_best = loss, True

    def save_if_due(self) -> None:
        if self._is_best:
            self._save(best=True)
        if self._every > 0 and self._report.updates % self._every == 0:
            self._save()

    def save_at_end(self) -> None:
        if self._every > 0:
            self._save()
        self._engine.finish_save()

    def save_if_best(self) -> None:
        """After a validation that came after save_at_end(): what it has found is added to that save."""
        if self._is_best and not self._path:
            self._saved = -1
            self._save(best=True)
            self._engine.finish_save()
        elif self._is_best:
            kept = self._policy["save_total_limit"], self._policy["keep_every"]
            _C.mark_best_save(self._path, {"best": repr(self._best)}, *kept)

    def save_at_signal(self, interrupted: Interrupted) -> None:
        """A window that was open is given back: its samples and random numbers come again."""
        if self._every == 0 or interrupted.number not in SAVE_FIRST:
            return
        if self._open is not None:
            self._engine.discard_window()
            cursor, snapshot = self._open
            self._data.windows.seek(cursor)
            snapshot.restore()
        self._save()
        self._engine.finish_save()
        self._report.note(f"  saved after update {self._report.updates} in {self._folder}")

    def _save(self, best: bool = False) -> None:
        if self._saved != self._report.updates:
            self._saved = self._report.updates
            self._last = {
                "cursor": self._data.windows.cursor,
                "user": {"report": self._report.text(), "data": json.dumps(self._data.identity)},
                "own": generators.own_texts(),
                "total_limit": self._policy["save_total_limit"],
                "keep_every": self._policy["keep_every"],
            }
            if self._validates:
                self._last["user"]["owes_validation"] = "yes"
        elif not best:
            return
        if self._best is not None:
            self._last["user"]["best"] = repr(self._best)
        self._path = self._engine.save(self._folder, best=best, **self._last)
        self._is_best = False
