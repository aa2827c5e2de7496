"""The blocks of docs/launching.md run as printed, on one machine with two ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from poise.demo.launch import train_command
from rank_processes import by_open_mpi, by_slurm, finish, free_port, start

PAGE = (Path(__file__).parents[2] / "docs" / "launching.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def line_with(*words: str) -> list[str]:
    """The one command of the page that has all these words."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    (line,) = [line for line in lines if all(word in line.split() for word in words)]
    return shlex.split(line)


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    """A folder with the page's files."""
    (tmp_path / "train.py").write_text(blocks("python")[0])
    (tmp_path / "run.json").write_text(blocks("json")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def as_here(command: list[str]) -> list[str]:
    """torchrun and poise of this interpreter and this build, whatever the PATH says."""
    words = {"torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    if "--no-python" in command or command[0] == "poise":
        words["poise"] = train_command()[:-1]
    return [part for word in command for part in words.get(word, [word])]


def torchrun(*commands: list[str]) -> list[str]:
    """The outputs of torchrun on each node."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    started = [
        subprocess.Popen(as_here(command), env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command in commands
    ]  # fmt: skip
    return finish(started)


def lines_of(folder: Path) -> list[dict]:
    text = (folder / "out" / "ranks" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def check_program(folder: Path) -> None:
    summary = lines_of(folder)[-1]
    assert (summary["ranks"], summary["stage"], summary["updates"]) == (2, 2, 3)


def test_python_by_torchrun(folder):
    (output,) = torchrun(line_with("torchrun", "train.py"))
    assert output.count("= global batch 16") == 1, output  # rank 0 alone shows it
    assert "2 ranks over gloo, ZeRO stage 3" in output
    assert [line["step"] for line in lines_of(folder)] == [2, 4, 6, 6]


def test_the_program_by_torchrun(folder):
    torchrun(line_with("torchrun", "--standalone", "poise"))
    check_program(folder)


def test_the_program_on_two_nodes(folder):
    command = line_with("torchrun", "--nnodes", "poise")
    port = str(free_port())
    here = {"node0": "127.0.0.1", "29500": port}
    command = [here.get(word, word) for word in command]
    place = command.index("--node-rank") + 1
    torchrun(command, [*command[:place], "1", *command[place + 1 :]])
    check_program(folder)


def test_the_program_by_mpirun(folder):
    command = line_with("mpirun", "-n", "2")
    assert command[3:5] == ["-x", "MASTER_PORT=29500"]  # what by_open_mpi gives it
    finish(start(as_here(command[5:]), launcher=by_open_mpi))
    check_program(folder)


def test_the_program_by_slurm(folder):
    command = line_with("srun", "poise")
    finish(start(as_here(command[2:]), launcher=by_slurm))
    check_program(folder)
