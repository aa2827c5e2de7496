"""The committed type stubs of the extension are what the extension has: `make stubs` renews them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import poise
from sources import ROOT


def test_stubs_are_those_of_the_extension(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(poise.__file__).parent.parent)}
    tools = Path(sys.executable).parent
    generate = [shutil.which("pybind11-stubgen", path=tools) or "pybind11-stubgen"]
    subprocess.run(
        [*generate, "poise._C", "--output-dir", str(tmp_path)],
        env=environment, check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    made = tmp_path / "poise" / "_C.pyi"
    ruff = shutil.which("ruff", path=tools) or "ruff"
    style = ["--isolated", "--line-length", "100"]
    subprocess.run([ruff, "format", "-q", *style, str(made)], check=True, timeout=60)
    committed = ROOT / "python" / "poise" / "_C.pyi"
    assert committed.read_text() == made.read_text(), "the bindings changed: run `make stubs`"
