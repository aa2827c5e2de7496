"""Ranks that die on their way to NCCL's communicator, on a pretend GPU each: the other ends with a message
that names them, also where NCCL would wait for them without end (tests/pretend_gpu/peers.cpp)."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pretend_gpu
import pytest
import rank_processes
from rank_processes import by_torchrun
from test_pretend_ranks import with_one_gpu

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(pretend_gpu.missing() is not None, reason=str(pretend_gpu.missing())),
]

BOTH = "cpu:gloo,cuda:nccl"
SCRIPT = str(Path(__file__).parent / "pretend_gpu_lost_ranks.py")


def dying(how: str, victim: int = 1) -> Any:
    """One rank dies in ncclCommInitRank, "unseen" or "seen" by the other, or only "fails" there."""

    def launcher(rank: int, size: int, port: int) -> dict[str, str]:
        asked = {"PRETEND_GPU_DIES_IN_INIT": how} if rank == victim else {}
        return {**with_one_gpu(rank, size, port), **asked}

    return launcher


def survivor(
    command: list[str], launcher: Any = with_one_gpu, victim: int = 1, code: int = -9
) -> tuple[str, float]:
    """What the other rank wrote, with the process number of the lost one taken out, and how many seconds
    after it it said why it ends, which it does as a failure, by itself."""
    ranks = rank_processes.start(command, launcher=launcher)
    lost, other = ranks[victim], ranks[1 - victim]
    lines: list[tuple[float, str]] = []

    def listen() -> None:
        for line in other.stdout:
            lines.append((time.monotonic(), line.replace(f"pid {lost.pid})", "pid of the lost)")))

    reader = threading.Thread(target=listen)
    reader.start()
    try:
        lost.wait(rank_processes.SECONDS)
        begun = time.monotonic()
        other.wait(rank_processes.SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
        reader.join()
    said = "".join(line for _, line in lines)
    assert (lost.returncode, other.returncode) == (code, 1), lost.communicate()[0] + said
    return said, next(when for when, line in lines if "[comm]" in line) - begun


def python(backend: str, case: str, *more: str) -> list[str]:
    return [sys.executable, SCRIPT, backend, case, *more]


GONE = r"rank 1 \(host \S+, pid of the lost\) disappeared: no sign of life for 10 s"


@pytest.mark.parametrize("backend", ["nccl", BOTH])
def test_a_rank_that_is_killed_in_its_group_is_named(backend: str) -> None:
    """While the other waits for it in ncclCommInitRank."""
    said, seconds = survivor(python(backend, "killed in its group"))
    assert re.search(f"poise.Error: .*{GONE}, before any collective", said), said
    assert seconds < 15


@pytest.mark.parametrize("how", ["unseen", "seen"])
def test_a_rank_that_dies_in_nccl_is_named(how: str) -> None:
    """Unseen, NCCL waits without end; seen, it says that some peer is gone."""
    said, seconds = survivor(python("nccl", "dies in ncclCommInitRank"), dying(how))
    assert re.search(f"poise.Error: .*{GONE}", said), said
    assert seconds < 15


def test_what_fails_in_nccl_on_one_rank_ends_the_other() -> None:
    """It has entered the collective that the other waits in, so that its leaving says nothing."""
    said, seconds = survivor(python("nccl", "fails in ncclCommInitRank"), dying("fails"), code=1)
    assert re.search(
        r"poise.Error: \[comm\] rank 1 \(host \S+, pid of the lost\) ended the group: collective 0, "
        "barrier of 'start' failed: NCCL error .*invalid usage",
        said,
    ), said
    assert seconds < 15


def test_the_rank_with_the_store_that_dies_in_nccl_is_named() -> None:
    said, seconds = survivor(python("nccl", "dies"), dying("unseen", victim=0), victim=0)
    assert "poise.Error: [comm] lost the store of the group; its host, rank 0" in said, said
    assert seconds < 15


def test_gloo_names_a_rank_that_died_before_its_group() -> None:
    said, seconds = survivor(python(BOTH, "killed before its group"))
    assert "poise.Error: [comm] rank 1 disappeared before it made its group: " in said, said
    assert seconds < 15


def test_without_gloo_a_rank_that_died_before_its_group_is_named_after_the_timeout() -> None:
    said, _ = survivor(python("nccl", "killed before its group", "timeout"))
    assert "waited 3 s in collective 0, barrier of 'start', for rank 1, which has not made" in said


def test_a_rank_that_fails_in_its_group_is_named() -> None:
    said, seconds = survivor(python("nccl", "raises in its group"), code=0)
    assert re.search(r"rank 1 \(.*\) ended the group: ValueError: a bad row", said), said
    assert seconds < 15


@pytest.mark.parametrize("case", ["late to its group", "late to the first collective"])
@pytest.mark.parametrize("backend", ["nccl", BOTH])
def test_a_late_rank_is_waited_for(backend: str, case: str) -> None:
    ranks = rank_processes.start(python(backend, case), launcher=with_one_gpu)
    assert all("through" in said for said in rank_processes.finish(ranks))


def test_a_late_rank_falls_by_the_timeout() -> None:
    ranks = rank_processes.start(
        python("nccl", "late to the first collective", "timeout"), launcher=with_one_gpu
    )
    said = rank_processes.finish(ranks, [1, 1])
    assert (
        "waited 3 s in collective 0, barrier of 'start', for rank 1, which is in no collective yet"
        in said[0]
    )


def test_a_trainer_names_a_rank_that_dies_in_nccl(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "pretend_gpu_alone.py")
    said, seconds = survivor([sys.executable, script, str(tmp_path), ""], dying("unseen"))
    assert re.search(f"poise.Error: .*{GONE}", said), said
    assert seconds < 15


def test_poise_train_names_a_rank_that_dies_in_nccl(tmp_path: Path) -> None:
    """In pure C++, where the group is that of the environment."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    settings = {
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "model": {"layers": 2, "width": 16, "heads": 2, "sequence_length": 16},
        "data": {"train": [str(tmp_path / "text.txt")]},
        "train": {"max_updates": 4, "output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "run.json").write_text(json.dumps(settings))
    program = pretend_gpu.built().parent.parent / "bin" / "poise"

    def launcher(rank: int, size: int, port: int) -> dict[str, str]:
        dies = {"PRETEND_GPU_DIES_IN_INIT": "unseen"} if rank == 1 else {}
        on_it = {**pretend_gpu.environment_of_programs(), "CUDA_VISIBLE_DEVICES": "0"}
        return {**on_it, **dies, **by_torchrun(rank, size, port)}

    said, seconds = survivor([str(program), "train", str(tmp_path / "run.json")], launcher)
    assert re.search(GONE, said), said
    assert seconds < 15
