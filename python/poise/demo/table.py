"""The table: its cells, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence

from poise.demo.outcome import MIB, Outcome

HEADINGS = (
    "row",
    "language",
    "micro-batch x accumulation",
    "ranks",
    "stage",
    "precision",
    "recomputed",
    "offloaded",
    "budget MiB",
    "peak MiB",
    "host MiB",
    "file MiB",
    "activations MiB",
    "tokens/s",
    "first loss",
    "last loss",
    "validation loss",
    "error",
)
SHORT = {  # the terminal is narrow
    "language": "lang",
    "micro-batch x accumulation": "batch",
    "precision": "type",
    "budget MiB": "budget",
    "peak MiB": "peak",
    "host MiB": "host",
    "file MiB": "file",
    "activations MiB": "activ.",
    "first loss": "first",
    "last loss": "last",
    "validation loss": "val",
}
TEXT_COLUMNS = {"row", "language", "precision", "recomputed", "offloaded", "error"}
NOTHING = "-"


def cells(outcome: Outcome) -> list[str]:
    """One text for each heading."""
    row = outcome.row
    return [
        row.name,
        "C++" if row.language == "cpp" else "Python",
        f"{outcome.micro_batch} x {row.accumulation}",
        str(row.ranks),
        str(row.stage) if row.ranks > 1 else NOTHING,
        row.precision,
        {"none": "no", "every_n": "every block"}.get(row.checkpointing, row.checkpointing),
        {"none": "no"}.get(row.offload, row.offload),
        _mib(outcome.budget_bytes or None),
        _mib(outcome.peak_bytes),
        _mib(outcome.host_bytes or None),
        _mib(outcome.file_bytes or None),
        _mib(outcome.accounts.get("activations")),
        f"{outcome.tokens_per_s:,.0f}" if outcome.tokens_per_s else NOTHING,
        _loss(outcome.losses[0] if outcome.losses else None),
        _loss(outcome.losses[-1] if outcome.losses else None),
        _loss(outcome.val_loss),
        outcome.error or "",
    ]


def short_error(error: str) -> str:
    """For a narrow cell."""
    return "out of memory" if "memory" in error.lower() else "failed"


def as_text(outcomes: Sequence[Outcome]) -> str:
    """The table for a terminal; what failed is said in full by the findings."""
    body = [cells(outcome) for outcome in outcomes]
    for line in body:
        line[-1] = short_error(line[-1]) if line[-1] else ""
    head = [SHORT.get(name, name) for name in HEADINGS]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [_line(head, widths), "  ".join("-" * width for width in widths)]
    lines += [_line(line, widths) for line in body]
    lines.append(
        "(batch: micro-batch x accumulation, on each rank; stage: of ZeRO; budget, peak, activ.: MiB "
        "of the device, host, file: MiB away from it, of one rank; val: validation loss)"
    )
    return "\n".join(lines)


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        text.ljust(width) if name in TEXT_COLUMNS else text.rjust(width)
        for name, text, width in zip(HEADINGS, texts, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _mib(count: int | None) -> str:
    return NOTHING if count is None else f"{count / MIB:.1f}"


def _loss(loss: float | None) -> str:
    return NOTHING if loss is None else f"{loss:.4f}"
