"""What is seen while the rows run: a bar for each on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tqdm import tqdm

from poise.demo.outcome import MIB, Outcome
from poise.demo.rows import Row
from poise.demo.table import short_error


class RowProgress:
    """Follows one row."""

    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def __call__(self, outcome: Outcome) -> None:
        done = len(outcome.losses)
        if done > self._bar.n:
            self._bar.set_postfix_str(f"loss {outcome.losses[-1]:.3f}", refresh=False)
            self._bar.update(done - self._bar.n)


@contextlib.contextmanager
def row_progress(row: Row, number: int, rows: int, updates: int) -> Iterator[RowProgress]:
    terminal = sys.stderr.isatty()
    head = f"[{number:2}/{rows}] {row.title}"
    if not terminal:
        print(f"{head} ...", flush=True)
    bar = tqdm(
        total=updates,
        desc=head,
        unit="update",
        leave=False,
        disable=not terminal,
        dynamic_ncols=True,
    )
    with bar:
        yield RowProgress(bar)


def closing_line(outcome: Outcome, number: int, rows: int) -> str:
    """Said when a row has ended."""
    head = f"[{number:2}/{rows}] {outcome.row.title:<46}"
    if outcome.error:
        return f"{head} {short_error(outcome.error)}"
    loss = f"loss {outcome.losses[0]:.3f} -> {outcome.losses[-1]:.3f}" if outcome.losses else ""
    peak = f"peak {(outcome.peak_bytes or 0) / MIB:6.1f} MiB"
    return f"{head} {loss}  {peak}  {outcome.tokens_per_s or 0:8,.0f} tokens/s"
