"""Runs a row in processes of its own, one for each rank: no row's memory is in another's books."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
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
NOTICE_SECONDS = 20.0  # in which a group ends after one of its ranks has
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
    with contextlib.ExitStack() as stack:
        ranks = _start(command, row.ranks, folder, stack)
        waits_until = None  # ranks notice a lost one by themselves
        while None in [rank.poll() for rank in ranks]:
            on_progress(outcome_of(row, size, budget, metrics))
            if waits_until is None and any(rank.returncode for rank in ranks):
                waits_until = time.monotonic() + NOTICE_SECONDS
            if waits_until is not None and time.monotonic() > waits_until:
                break
            time.sleep(POLL_SECONDS)
    outcome = outcome_of(row, size, budget, metrics)
    outcome.command = shlex.join([*_launcher(row.ranks), *command])
    failed = [number for number, rank in enumerate(ranks) if rank.returncode != 0]
    if failed:
        texts = [_stderr(folder, number).read_text("utf-8", "replace") for number in failed]
        outcome.error = outcome.error or next((e for e in map(error_in, texts) if e), None)
        status = ranks[failed[0]].returncode
        outcome.error = outcome.error or f"ended with status {status} and no message"
    on_progress(outcome)
    return outcome


def _launcher(ranks: int) -> list[str]:
    """What starts a row's ranks from a shell."""
    if ranks == 1:
        return []
    start = ["-m", "torch.distributed.run", "--standalone", "--no-python"]
    return [sys.executable, *start, "--nproc-per-node", str(ranks)]


def _start(
    command: list[str], ranks: int, folder: Path, stack: contextlib.ExitStack
) -> list[subprocess.Popen]:
    """A process for each rank, as _launcher would start them but without its seconds; the end of
    `stack` ends them."""
    of_group = _group_environment(ranks) if ranks > 1 else {}
    processes = []
    for rank in range(ranks):
        stdout = stack.enter_context(open(folder / f"stdout{_suffix(rank)}.txt", "wb"))
        stderr = stack.enter_context(open(_stderr(folder, rank), "wb"))
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            env={**_environment(ranks), **of_group, **of_rank},
        )
        stack.callback(_end, process)
        processes.append(process)
    return processes


def _suffix(rank: int) -> str:
    return f"_rank{rank}" if rank > 0 else ""


def _stderr(folder: Path, rank: int) -> Path:
    return folder / f"stderr{_suffix(rank)}.txt"


def _group_environment(ranks: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def error_in(stderr: str) -> str:
    """The message of a run that failed: from its last "error: " on, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for i in reversed(range(len(lines))):
        head, mark, message = lines[i].partition("error: ")
        if mark and len(head) < 20:
            return " ".join([message, *lines[i + 1 :]])
    return lines[-1] if lines else ""


def _environment(ranks: int) -> dict[str, str]:
    """This package first, the same number of threads in every row (the ranks share them), no GPU.

    The rows are sized for CPUs, and a budget holds on every one of them alike.
    """
    environment = dict(os.environ)
    paths = [str(PACKAGE_FOLDER), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = str(max(1, machine.threads() // ranks))
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
