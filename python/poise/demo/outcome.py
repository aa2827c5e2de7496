"""What a row came to: read from its metrics.jsonl, written to summary.json."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from poise.demo import DemoError
from poise.demo.rows import Row, Size, choose_budget

MIB = 1 << 20


@dataclasses.dataclass
class Outcome:
    """A row with what was measured."""

    row: Row
    micro_batch: int
    tokens: int  # of one update
    budget_bytes: int = 0  # 0: none
    losses: list[float] = dataclasses.field(default_factory=list)
    update_seconds: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None  # of the first rank; the others hold as much
    accounts: dict[str, int] = dataclasses.field(default_factory=dict)  # at the peak
    host_bytes: int = 0  # offloaded, staging included
    file_bytes: int = 0
    loss_scales: list[float] = dataclasses.field(default_factory=list)
    skipped: int = 0
    val_loss: float | None = None
    prompt: str | None = None
    sample: str | None = None
    error: str | None = None
    command: str = ""

    @property
    def seconds_per_update(self) -> float | None:
        """Median; the first update also warms up caches and libraries."""
        seconds = self.update_seconds[1:] or self.update_seconds
        return statistics.median(seconds) if seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        seconds = self.seconds_per_update
        return self.tokens / seconds if seconds else None


def outcome_of(row: Row, size: Size, budget: int, metrics: Path) -> Outcome:
    """Reads what a row has written so far; a row that failed may have written nothing."""
    outcome = Outcome(row, row.micro_batch(size), size.tokens, budget if row.has_budget else 0)
    for line in read_metrics(metrics):
        if "loss" in line:
            _add_update(outcome, line)
        _raise_peak(outcome, line.get("accounts") or {})
        outcome.val_loss = line.get("eval_loss", outcome.val_loss)
        outcome.prompt = printable(line["prompt"]) if "prompt" in line else outcome.prompt
        outcome.sample = printable(line["sample"]) if "sample" in line else outcome.sample
        outcome.error = line.get("error", outcome.error)
    return outcome


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines; the last may be half written while its run goes on."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def printable(text: str) -> str:
    """The text without what would steer a terminal: a model may write any byte."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _add_update(outcome: Outcome, line: dict[str, Any]) -> None:
    outcome.losses.append(float(line["loss"]))  # "nan" and "inf" are written as strings
    if line.get("tokens_per_second"):
        outcome.update_seconds.append(outcome.tokens / float(line["tokens_per_second"]))
    if "loss_scale" in line:
        outcome.loss_scales.append(float(line["loss_scale"]))
    outcome.host_bytes = int(line.get("host_bytes", 0))
    outcome.file_bytes = int(line.get("file_bytes", 0))
    outcome.skipped = int(line.get("skipped", 0))


def _raise_peak(outcome: Outcome, accounts: dict[str, int]) -> None:
    total = sum(accounts.values())
    if total > (outcome.peak_bytes or 0):
        outcome.peak_bytes, outcome.accounts = total, dict(accounts)


def budget_from(outcomes: Sequence[Outcome]) -> int:
    """The budget that the rows run so far lead to."""
    fp32 = [
        entry
        for entry in fp32_curves(outcomes)
        if entry.peak_bytes and not entry.error and not entry.budget_bytes and entry.row.ranks == 1
    ]
    plain = [entry.peak_bytes for entry in fp32 if entry.row.accumulation == 1]
    if not plain:
        errors = "; ".join(f"{entry.row.title}: {entry.error}" for entry in outcomes if entry.error)
        raise DemoError(
            "[demo] no plain row came to its end, so there is nothing to choose a budget from: "
            f"{errors or 'none has run'}"
        )
    return choose_budget(min(plain), min(entry.peak_bytes for entry in fp32))


STATES = ("parameters", "gradients", "optimizer")  # accounts that no batch size changes


def budget_of(row: Row, outcomes: Sequence[Outcome], shared: int) -> int:
    """The bytes a row may hold; 0: as many as it likes.

    Args:
      row: which is to run.
      outcomes: of the rows before it; the first has its states on the device.
      shared: the budget of all rows that have that one.
    """
    if row.states_over_budget:
        states = sum(outcomes[0].accounts.get(name, 0) for name in STATES)
        return states // row.states_over_budget
    return shared if row.budgeted else 0


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What summary.json holds."""
    return {"rows": [_summary_row(outcome) for outcome in outcomes]}


def _summary_row(outcome: Outcome) -> dict[str, Any]:
    row = outcome.row
    return {
        "name": row.name,
        "language": row.language,
        "ranks": row.ranks,
        "stage": row.stage,
        "precision": row.precision,
        "micro_batch": outcome.micro_batch,
        "accumulation": row.accumulation,
        "checkpointing": row.checkpointing,
        "offload": row.offload,
        "host_bytes": outcome.host_bytes,
        "file_bytes": outcome.file_bytes,
        "budget_bytes": outcome.budget_bytes,
        "peak_bytes": outcome.peak_bytes,
        "accounts": outcome.accounts,
        "tokens_per_s": outcome.tokens_per_s,
        "losses": [_finite(loss) for loss in outcome.losses],
        "val_loss": _finite(outcome.val_loss),
        "error": outcome.error,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no word for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def fp32_curves(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Rows whose losses must agree."""
    return [outcome for outcome in outcomes if outcome.row.kind == "parity"]
