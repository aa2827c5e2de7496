"""Runs a row in a process of its own, so that no row's memory is in another's books."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import poise
from poise.demo import machine
from poise.demo.outcome import Outcome, outcome_of
from poise.demo.rows import Row, Size, run_settings

POLL_SECONDS = 0.2
PACKAGE_FOLDER = Path(poise.__file__).parent.parent  # not resolved: the staged one, not its links


def train_command() -> list[str]:
    """`poise train` of the binary in this package's build, else of the installed command."""
    build = PACKAGE_FOLDER.parent
    for candidate in (build / "bin" / "poise", build / "src" / "cli" / "poise", build / "poise"):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return [str(candidate), "train"]
    installed = shutil.which("poise")
    return [installed, "train"] if installed else [sys.executable, "-m", "poise", "train"]


def run_row(
    row: Row,
    size: Size,
    corpus: Path,
    out: Path,
    budget: int,
    on_progress: Callable[[Outcome], None],
) -> Outcome:
    """Trains a row to its end; a row that fails comes back with its error.

    Args:
      row: which.
      size: what all rows share.
      corpus: the text.
      out: folder of the demo; the row writes below it.
      budget: bytes, for a row that has a budget.
      on_progress: gets the outcome so far, a few times a second.
    """
    folder = out / "rows" / row.slug
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = folder / "run.json"
    settings.write_text(
        json.dumps(run_settings(row, size, corpus, folder, budget), indent=2) + "\n"
    )
    program = train_command() if row.language == "cpp" else [sys.executable, "-m", "poise.demo.row"]
    command = [*program, str(settings)]
    metrics = folder / "metrics.jsonl"

    with open(folder / "stdout.txt", "wb") as stdout, open(folder / "stderr.txt", "wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=_environment())
        try:
            while process.poll() is None:
                on_progress(outcome_of(row, size, budget, metrics))
                time.sleep(POLL_SECONDS)
        finally:
            _end(process)
    outcome = outcome_of(row, size, budget, metrics)
    outcome.command = shlex.join(command)
    if process.returncode != 0:
        text = (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")
        outcome.error = outcome.error or error_in(text)
        outcome.error = outcome.error or f"ended with status {process.returncode} and no message"
    on_progress(outcome)
    return outcome


def error_in(stderr: str) -> str:
    """The message of a run that failed: from its last "error: " on, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for i in reversed(range(len(lines))):
        head, mark, message = lines[i].partition("error: ")
        if mark and len(head) < 20:
            return " ".join([message, *lines[i + 1 :]])
    return lines[-1] if lines else ""


def _environment() -> dict[str, str]:
    """This package first, the same number of threads in every row, and no GPU.

    The rows are sized for CPUs, and a budget holds on every one of them alike.
    """
    environment = dict(os.environ)
    paths = [str(PACKAGE_FOLDER), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = str(machine.threads())
    return environment


def _end(process: subprocess.Popen) -> None:
    """Nothing goes on when the demo is interrupted."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
