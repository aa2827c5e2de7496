"""`python -m poise.deepspeed`: the machines of a hostfile, and ranks on them. ssh is a stand-in that runs the
line here, so that two "machines" are two torchruns."""

import json
import os
import subprocess
import sys

import poise
import pytest
import rank_processes
from poise.deepspeed import hosts
from poise.deepspeed.hosts import Host


def written(folder, text):
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_machines_and_their_slots_are_read(tmp_path):
    path = written(tmp_path, "# ours\nworker-1 slots=4\n\nworker-2  slots = 2 # old\n")
    assert hosts.read(path) == [Host("worker-1", (0, 1, 2, 3)), Host("worker-2", (0, 1))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker-1\n", "line 1 of .* is 'worker-1'; write 'name slots=8'"),
        ("a slots=0\n", "line 1"),
        ("a slots=1\na slots=2\n", "line 2 of .* names a again"),
        ("# none\n", "names no machine"),
    ],
)
def test_what_is_no_hostfile_is_told_with_its_line(text, words, tmp_path):
    with pytest.raises(poise.Error, match=words):
        hosts.read(written(tmp_path, text))
    with pytest.raises(poise.Error, match="cannot read the hostfile .*nothing: No such file"):
        hosts.read(tmp_path / "nothing")


ALL = [Host("a", (0, 1, 2, 3)), Host("b", (0, 1))]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", ALL),
        ("b", "", [ALL[1]]),
        ("a:0,2@b", "", [Host("a", (0, 2), True), ALL[1]]),
        ("", "a", [ALL[1]]),
        ("", "a:1@b:0", [Host("a", (0, 2, 3), True), Host("b", (1,), True)]),
    ],
)
def test_machines_are_chosen_as_by_deepspeed(include, exclude, expected):
    assert hosts.chosen(ALL, include, exclude) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        ("c", "", "c is not in the hostfile; it has a, b"),
        ("b:2", "", "'b:2': b has slots 0 to 1"),
        ("a", "b", "both given"),
        ("", "a@b", "no rank is left of a, b"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_an_error(include, exclude, words):
    with pytest.raises(poise.Error, match=words):
        hosts.chosen(ALL, include, exclude)


SCRIPT = """
import argparse, json, os, sys, time
import poise as deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--out")
options = parser.parse_args()
torch.set_num_threads(1)
deepspeed.init_distributed("nccl")
place = torch.distributed
total = torch.ones(1)
place.all_reduce(total)
said = {"rank": place.get_rank(), "local": options.local_rank, "total": float(total),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
with open(f"{options.out}.{place.get_rank()}", "w") as file:
    json.dump(said, file)
time.sleep(0.3)  # torch's own thread lets go of `total`; while the interpreter ends it would abort
sys.exit(3 if options.deepspeed_config == "fail" and place.get_rank() == 0 else 0)
"""


@pytest.fixture
def start(tmp_path):
    """Runs the command with a stand-in for ssh; (status, what each rank said, machines reached)."""
    (tmp_path / "train.py").write_text(SCRIPT)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").write_text(
        f'#!/bin/sh\nshift 2\necho "$1" >> {tmp_path}/reached\nexec sh -c "$2"\n'
    )
    (tools / "ssh").chmod(0o755)

    def run(text, *options, script=()):
        own = {name: v for name, v in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        path = f"{tools}:{os.environ['PATH']}"
        paths = os.pathsep.join(p for p in sys.path if p)
        port = str(rank_processes.free_port())
        done = subprocess.run(
            [sys.executable, "-m", "poise.deepspeed", "--hostfile", written(tmp_path, text),
             "--master_addr", "127.0.0.1", "--master_port", port, *options,
             "train.py", "--out", tmp_path / "said", *script],
            env={**own, "PATH": path, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        said = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("said.*"))]
        reached = tmp_path / "reached"
        return done, said, reached.read_text().split() if reached.exists() else []

    return run


def test_a_script_runs_on_two_machines(start):
    done, said, reached = start(
        "localhost slots=2\nother slots=2\n", "--include", "localhost@other:1"
    )
    assert done.returncode == 0, done.stderr
    assert reached == ["other"]
    assert [(one["rank"], one["local"]) for one in said] == [(0, 0), (1, 1), (2, 0)]
    assert [one["total"] for one in said] == [3.0] * 3
    assert [one["gpus"] for one in said] == [None, None, "1"]


def test_a_rank_that_fails_ends_all_with_its_status(start):
    done, _, _ = start("localhost slots=1\nother slots=1\n", script=["--deepspeed_config", "fail"])
    assert done.returncode != 0


def test_a_wrong_hostfile_is_one_line(start):
    done, said, _ = start("nobody\n")
    assert done.returncode == 1 and said == []
    assert done.stderr.strip().startswith("poise: error: [deepspeed] line 1 of")
