"""Runs a program on a terminal of its own (a pty) and keeps what it wrote there."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import termios
import time
from pathlib import Path

import poise


def environment() -> dict[str, str]:
    """Of a program that imports this poise from any folder."""
    package = str(Path(poise.__file__).absolute().parent.parent)
    return {**os.environ, "PYTHONPATH": package}


def run_in_terminal(
    command: list[str],
    folder: Path,
    seconds: float = 300,
    stdout: bool = True,
    stderr: bool = True,
    columns: int = 120,
) -> tuple[int, str]:
    """Exit status, and the text on the terminal.

    Args:
      command: and its arguments.
      folder: that it runs in.
      seconds: after which it is ended, which is an error.
      stdout, stderr: which of its streams is the terminal; the other one is dropped.
      columns: of the terminal.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40 if columns else 0, columns))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment(), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=theirs if stdout else subprocess.DEVNULL,
        stderr=theirs if stderr else subprocess.DEVNULL,
    )
    os.close(theirs)
    text, end = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            text += piece
        return process.wait(timeout=max(1.0, end - time.monotonic())), text.decode()
    finally:
        process.kill()
        os.close(ours)
