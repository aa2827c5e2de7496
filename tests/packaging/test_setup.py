"""setup/prepare.sh on machines of our making: stand-ins for id, dpkg, apt-get and sudo on the PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(tmp_path):
    """Gives run(uid=..., packages=...): the script in a copy of its own, and what it called."""
    tree, tools = tmp_path / "tree", tmp_path / "tools"
    shutil.copytree(ROOT / "setup", tree / "setup")
    (tree / "cmake").mkdir()
    shutil.copy(ROOT / "cmake" / "torch.cmake", tree / "cmake")
    tools.mkdir()
    calls = tmp_path / "calls.txt"

    def tool(name, text):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)

    def run(uid, packages_there, first_on_path="/nowhere", words=(), **environment):
        tool("id", f"echo {uid}")
        tool("dpkg", f"exit {0 if packages_there else 1}")
        for name in ("apt-get", "sudo"):
            tool(name, f'echo {name} "$@" >> {calls}')
        path = f"{tools}:{first_on_path}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", tree / "setup" / "prepare.sh", *words],
            env={**os.environ, "PATH": path, "YES": "0", **environment},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done, calls.read_text() if calls.exists() else ""

    environment = Path(sys.executable).parent
    run.active = {"VIRTUAL_ENV": str(environment.parent), "PYTHON": sys.executable}
    run.tree = tree
    return run


def test_nothing_missing_installs_nothing(machine):
    done, calls = machine(0, packages_there=True, **machine.active)
    assert done.returncode == 0, done.stderr
    assert calls == ""
    assert done.stdout.startswith("set-up: ready") and done.stdout.count("\n") == 1
    assert (
        sys.executable.rsplit("/", 1)[0] in (machine.tree / "build/setup/environment").read_text()
    )


def test_user_is_shown_the_apt_line_and_asked(machine):
    done, calls = machine(1000, packages_there=False, **machine.active)
    assert done.returncode != 0 and calls == ""
    assert "as root: apt-get install -y --no-install-recommends g++ make cmake" in done.stdout
    assert "YES=1" in done.stderr


def test_yes_skips_asking(machine):
    done, calls = machine(1000, packages_there=False, YES="1", **machine.active)
    assert done.returncode == 0, done.stderr
    assert "sudo apt-get update" in calls and "nlohmann-json3-dev" in calls


def test_root_installs_what_is_missing_and_says_so_first(machine):
    done, calls = machine(0, packages_there=False, **machine.active)
    assert done.returncode == 0, done.stderr
    assert "to download" in done.stdout and "minute" in done.stdout
    assert "apt-get update" in calls and "sudo" not in calls


def test_what_only_tests_use_is_installed_for_tests_alone(machine):
    only_tests = (machine.tree / "setup" / "packages_tests.txt").read_text().split()[0]
    assert only_tests == "chromium"
    for name in ("packages.txt", "packages_tests.txt"):  # count on every Debian-like system
        path = machine.tree / "setup" / name
        path.write_text("\n".join(line.split()[0] for line in path.read_text().splitlines()) + "\n")
    done, calls = machine(0, packages_there=False, **machine.active)
    assert done.returncode == 0 and "g++" in calls and only_tests not in calls
    assert "for tests" not in done.stdout
    done, calls = machine(0, packages_there=False, words=["tests"], **machine.active)
    assert done.returncode == 0 and "g++" in calls and only_tests in calls


def test_without_torch_the_venv_and_its_price_are_told_first(machine, tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True, timeout=120)
    done, calls = machine(
        1000,
        packages_there=True,
        TORCH_INDEX="file:///wheels",
        VIRTUAL_ENV=str(bare),
        CONDA_PREFIX="",
        PYTHON=str(bare / "bin" / "python"),
        first_on_path=bare / "bin",
    )
    assert done.returncode != 0 and calls == ""
    assert "torch==2.11.0 from TORCH_INDEX into .venv" in done.stdout
    assert not (machine.tree / ".venv").exists()
