"""The text of the demo: the standard library of the running Python, which every machine has."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from poise.demo import DemoError

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
CAP_BYTES = 6 << 20


def source_files(folder: Path) -> list[Path]:
    """The .py files below a folder, in an order that no file system changes."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [Path(parent, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def write_corpus(target: Path, cap_bytes: int = CAP_BYTES) -> int:
    """Joins the standard library's files into one; returns its bytes.

    Both languages then read one and the same file, so that their samples are the same too.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    left = cap_bytes
    with open(target, "wb") as out:
        for path in source_files(folder):
            try:
                text = path.read_bytes()[:left]
            except OSError:
                continue  # a file that this user may not read is no loss
            out.write(text)
            left -= len(text)
            if left == 0:
                break
    size = cap_bytes - left
    if size < min(cap_bytes, 1 << 16):
        raise DemoError(
            f"[demo] the standard library in {folder} has only {size} bytes of .py files; "
            "the demo trains on them: use a Python that comes with its sources"
        )
    return size
