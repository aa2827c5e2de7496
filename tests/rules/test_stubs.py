"""The committed type stubs are what the extension has: `make stubs` renews them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import poise
from sources import ROOT


def test_stubs_are_those_of_the_extension(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(poise.__file__).parent.parent)}
    script = ROOT / "python" / "stubs.py"
    subprocess.run(
        [sys.executable, script, tmp_path],
        env=environment,
        check=True,
        capture_output=True,
        timeout=400,
    )
    made = (tmp_path / "poise" / "_C.pyi").read_text()
    committed = (ROOT / "python" / "poise" / "_C.pyi").read_text()
    assert committed == made, "the bindings changed: run `make stubs`"
