"""The live bar of a run, and log lines that do not break it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from poise._C import StepResult, format_bytes

GIB = 1 << 30
_SHOWN = (  # of a line: key, words
    ("loss", "loss {:.4f}"),
    ("eval_loss", "eval_loss {:.4f}"),
    ("learning_rate", "lr {:.3g}"),
    ("grad_norm", "norm {:.3f}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("mfu", "mfu {:.1%}"),
    ("loss_scale", "scale {:g}"),
    ("train_loss", "done: mean loss {:.4f}"),
    ("train_runtime", "{:.1f} s"),
)


class Progress:
    """A bar over updates: loss, learning rate, gradient norm, tokens/s, memory.

    While it is open, log lines for the terminal (those of the C++ core come through the logger
    "poise") are written above the bar, and notes are shown although Python hides them by default.

    Args:
      total: updates of the run.
      disable: no bar; None: only where standard error is no terminal.
    """

    def __init__(self, total: int, disable: bool | None = None) -> None:
        self._open = contextlib.ExitStack()
        self._bar = self._open.enter_context(
            tqdm(total=total, disable=disable, unit="update", file=sys.stderr, **_size())
        )
        if not self._bar.disable:
            self._open.enter_context(logging_redirect_tqdm())
            self._open.enter_context(_notes_shown())

    def update(self, result: StepResult, tokens_per_second: float) -> None:
        fields = {
            "loss": f"{result.loss:.4f}",
            "lr": f"{result.lr:.2e}",
            "norm": f"{result.grad_norm:.3f}",
            "tok/s": f"{tokens_per_second:,.0f}",
            "mem": f"{result.peak_bytes / GIB:.2f}GiB",
        }
        if result.skipped:
            fields["skipped"] = str(result.skipped)
        self._bar.set_postfix(fields, refresh=False)
        self._bar.update(1)

    def note(self, line: str) -> None:
        """A line of its own, above the bar."""
        self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def line_of(values: Mapping[str, Any], updates: int) -> str:
    """A line of metrics for people: what it tells of updates, an evaluation or the end."""
    parts = [f"update {values['step']}/{updates}"]
    parts += [words.format(values[key]) for key, words in _SHOWN if key in values]
    if "peak_bytes" in values:
        percent = f" ({values['memory_percent']:.3g}%)" if "memory_percent" in values else ""
        parts.append(format_bytes(int(values["peak_bytes"])) + percent)
    told = {key for key, _ in _SHOWN}
    parts += [
        f"{key} {value:.4g}"
        for key, value in values.items()
        if key.startswith("eval_") and key not in told and isinstance(value, (int, float))
        if not key.endswith(("_runtime", "_tokens", "_per_second"))
    ]
    if values.get("status", "applied") != "applied":
        name = values.get("first_bad_parameter")
        parts.append(f"{values['status']}{f' in {name}' if name else ''}: not applied")
    if values.get("skipped"):
        parts.append(f"{values['skipped']} skipped")
    return "  ".join(parts)


def _size() -> dict[str, Any]:
    """Of the terminal, as it changes; one that says 0 columns (some containers' do) would show nothing."""
    try:
        unknown = os.get_terminal_size(sys.stderr.fileno()).columns == 0
    except (OSError, ValueError, AttributeError):
        unknown = False  # no terminal
    return {"ncols": 120, "nrows": 40} if unknown else {"dynamic_ncols": True}


@contextlib.contextmanager
def _notes_shown():
    logger = logging.getLogger("poise")
    level = logger.level
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
