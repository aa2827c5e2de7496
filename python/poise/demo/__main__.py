"""The command `python -m poise.demo`: runs the rows, prints the table, writes the report."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from poise.demo import DemoError, corpus, launch, machine, plots, progress, report, table
from poise.demo.findings import Findings, findings
from poise.demo.outcome import MIB, Outcome, budget_from, budget_of, summary
from poise.demo.rows import FULL, QUICK, Row, Size, all_rows, quick_rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="poise demo",
        description="Trains a small byte-level GPT in several ways (micro-batch, recomputation, "
        "precision, a memory budget, two ranks, offload), checks that they are the same training, and writes "
        "report.html, summary.json and the runs' metrics. About four minutes on two cores.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder of the results (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and few updates")
    return parser.parse_args(arguments)


def run_rows(rows: Sequence[Row], size: Size, text: Path, out: Path) -> list[Outcome]:
    """All rows, one after another; the budget comes from the peaks of those before it is needed."""
    outcomes: list[Outcome] = []
    budget = 0
    for number, row in enumerate(rows, start=1):
        if row.budgeted and not budget:
            budget = budget_from(outcomes)
            print(f"The budget of the next rows, from these peaks: {budget / MIB:.1f} MiB")
        own = budget_of(row, outcomes, budget)
        with progress.row_progress(row, number, len(rows), row.updates(size)) as follow:
            outcome = launch.run_row(row, size, text, out, own, follow)
        outcomes.append(outcome)
        print(progress.closing_line(outcome, number, len(rows)), flush=True)
    return outcomes


def write_results(outcomes: Sequence[Outcome], found: Findings, out: Path, rerun: str) -> None:
    (out / "summary.json").write_text(json.dumps(summary(outcomes), indent=2) + "\n")
    pictures = plots.draw_all(outcomes, out)
    text = report.page(outcomes, found, pictures, machine.facts(), rerun)
    (out / "report.html").write_text(text, encoding="utf-8")


def say(outcomes: Sequence[Outcome], found: Findings) -> None:
    print("\n" + table.as_text(outcomes) + "\n")
    for sentence in found.words:
        print(sentence)
    for outcome in outcomes:
        if outcome.sample:
            print(f"\n{outcome.row.title}, after {len(outcome.losses)} updates, goes on from")
            print(f"{outcome.prompt or ''}\nlike this:\n{outcome.sample}")
    for problem in found.problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 where everything was shown that shall be, 1 where not, 130 after Ctrl-C."""
    chosen = parse(arguments)
    begin = time.perf_counter()
    out = chosen.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    size, rows = (QUICK, quick_rows()) if chosen.quick else (FULL, all_rows())
    text = out / "corpus.txt"
    try:
        count = corpus.write_corpus(text)
        print(
            f"A byte-level GPT on {count / MIB:.1f} MiB of Python sources: {len(rows)} rows of the "
            f"same training, {size.tokens:,} tokens an update, {machine.threads()} threads."
        )
        outcomes = run_rows(rows, size, text, out)
    except KeyboardInterrupt:
        print("\nInterrupted; nothing goes on in the background.", file=sys.stderr)
        return 130
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = findings(outcomes)
    rerun = f"{shlex.quote(sys.executable)} -m poise.demo --out {shlex.quote(str(chosen.out))}"
    write_results(outcomes, found, out, rerun + (" --quick" if chosen.quick else ""))
    say(outcomes, found)
    print(f"\n{out / 'report.html'}\n{out / 'summary.json'}")
    print(f"Took {time.perf_counter() - begin:.0f} s.")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
