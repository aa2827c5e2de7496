"""A torch.profiler trace of chosen updates; each stop of an update is a range in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from poise._C import Error

Steps = int | str | Sequence[int] | None


def read_steps(steps: Steps) -> tuple[int, int] | None:
    """3, "3", "3-5", "3:5" or (3, 5): the first and last update of a trace, counted from 1."""
    if steps is None or steps == "" or steps == []:
        return None
    try:
        if isinstance(steps, str):
            steps = [int(part) for part in steps.replace(":", "-").split("-")]
        first, last = (steps, steps) if isinstance(steps, int) else (int(steps[0]), int(steps[-1]))
    except (ValueError, TypeError, IndexError):
        first, last = 0, 0
    if not 1 <= first <= last:
        raise Error(
            f"[trainer] profile_steps is {steps!r}; give one update or first-last, counted from 1"
        )
    return first, last


class Profiling:
    """Records the updates `steps` and writes a trace into `folder`.

    Args:
      steps: as read_steps takes them.
      folder: is made where there is something to write.
      name: of the file; None: trace_<first>_<last>.json.
    """

    def __init__(self, steps: Steps, folder: Path, name: str | None = None) -> None:
        self._steps = read_steps(steps)
        self._folder, self._name = folder, name
        self._profiler: torch.profiler.profile | None = None
        self.path: Path | None = None

    def before(self, update: int) -> None:
        """Before its data are read; again where a window was dropped."""
        if self._steps is None or update != self._steps[0] or self._profiler is not None:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def after(self, update: int) -> bool:
        """Whether the trace was written now."""
        done = self._profiler is not None and update == self._steps[1]
        if done:
            self.close()
        return done

    def close(self) -> None:
        """Writes what was recorded, also where the run ends inside the range."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        first, last = self._steps
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path = self._folder / (self._name or f"trace_{first}_{last}.json")
        profiler.export_chrome_trace(str(self.path))
