"""Writes the type stubs of poise._C into a folder: python stubs.py FOLDER -> FOLDER/poise/_C.pyi.

`make stubs` writes the committed ones; tests/rules/test_stubs.py compares.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BASES = {"WindowDropped": "BaseException"}  # of the exceptions that are no errors


def write_stubs(folder: str) -> Path:
    python = [sys.executable, "-m"]
    subprocess.run(
        [*python, "pybind11_stubgen", "poise._C", "--output-dir", folder],
        check=True, timeout=300,
    )  # fmt: skip
    stubs = Path(folder) / "poise" / "_C.pyi"
    # The exceptions call themselves poise.Error, where users find them; to a type checker that would
    # be a circle, since the package takes them from here.
    text = re.sub(
        r"^from poise import (Bug|Error|WindowDropped)$",
        lambda found: f"class {found[1]}({BASES.get(found[1], 'RuntimeError')}): ...",
        stubs.read_text(),
        flags=re.M,
    )
    stubs.write_text(text)
    style = ["--isolated", "--line-length", "100"]
    subprocess.run([*python, "ruff", "format", "-q", *style, str(stubs)], check=True, timeout=60)
    return stubs


if __name__ == "__main__":
    write_stubs(sys.argv[1])
