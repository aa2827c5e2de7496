"""poise on two ranks with a pretend GPU each: torch's NCCL group over a stand-in for libnccl.

What this shows: which collectives run, in which order of streams and hosts, that ranks end or go on
together, and results to the bit. What it does not: NCCL itself.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pretend_gpu
import pytest
import rank_processes
from rank_processes import by_torchrun

pytestmark = pytest.mark.skipif(
    pretend_gpu.missing() is not None, reason=str(pretend_gpu.missing())
)


def with_one_gpu(rank: int, size: int, port: int) -> dict[str, str]:
    """As Slurm shows each rank its own."""
    return {
        **pretend_gpu.environment(),
        "CUDA_VISIBLE_DEVICES": "0",
        **by_torchrun(rank, size, port),
    }


def with_two_gpus(rank: int, size: int, port: int) -> dict[str, str]:
    two = {**pretend_gpu.environment(devices=2), "CUDA_VISIBLE_DEVICES": "0,1"}
    return {**two, **by_torchrun(rank, size, port)}


def run(names: str, tmp_path_factory: pytest.TempPathFactory, launcher: Any) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return rank_processes.run("pretend_gpu_ranks.py", names, folder, launcher=launcher)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return [seen["training"] for seen in run("training", tmp_path_factory, with_two_gpus)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("collectives waits out_of_memory trainer", tmp_path_factory, with_one_gpu)


# The stand-in itself.


def test_collectives_are_those_of_gloo(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["collectives"] == dict.fromkeys(seen["collectives"], True)
        assert len(seen["collectives"]) == 8


def test_a_collective_holds_up_no_host(ranks: list[dict[str, Any]]) -> None:
    assert [seen["waits"] for seen in ranks] == [[False, [2.0] * 4]] * 2


# poise on it.


def test_ranks_train_as_on_the_cpu(training: list[dict[str, Any]]) -> None:
    """Every stage, to the bit, but for sums in 16 bits: NCCL makes those in the type of the wire."""
    assert training[0] == training[1] and len(training[0]) == 24
    for case, seen in training[0].items():
        if "on the wire" in case:
            losses = ([update[0] for update in seen[device][0]] for device in ("cuda", "cpu"))
            assert next(losses) == pytest.approx(next(losses), rel=1e-3), case
        else:
            assert seen["cuda"] == seen["cpu"], case


def test_trainer_runs_as_on_the_cpu(ranks: list[dict[str, Any]]) -> None:
    """Losses, evaluations, parameters, what was resumed, predictions of all ranks."""
    first, second = (seen["trainer"] for seen in ranks)
    assert first == second
    assert (first.pop("cpu, backend"), first.pop("cuda, backend")) == ("gloo", "nccl")
    for name in ("stage 0", "stage 2", "stage 3", "predictions"):
        assert first[f"cuda, {name}"] == first[f"cpu, {name}"], name
        if name != "predictions":
            whole, rest = first[f"cuda, {name}"]
            assert rest == [whole[0][4:], *whole[1:]], "the rest of the run, from its save"


def test_all_ranks_hear_of_one_without_memory(ranks: list[dict[str, Any]]) -> None:
    first, second = (seen["out_of_memory"] for seen in ranks)
    assert first[::2] == second[::2] == ["applied"] * 2
    assert "rank 1 ran out of memory; the window is dropped on all ranks" in first[1]
    assert "CUDA out of memory" in first[1] and "CUDA out of memory" in second[1]


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_lost_rank_ends_the_others(how: str, tmp_path: Path) -> None:
    """Though they wait on the GPU for what it will never bring."""
    script = Path(__file__).parent / "pretend_gpu_ranks.py"
    command = [sys.executable, str(script), how, str(tmp_path)]
    ranks = rank_processes.start(command, launcher=with_one_gpu)
    rank_processes.finish(ranks, [0, -9] if how == "killed" else [0, 0])
    said, seconds = json.loads((tmp_path / f"{how}_0.json").read_text())[how]
    assert said.startswith("Error: [comm] rank 1 (host ") and f", pid {ranks[1].pid})" in said
    assert seconds < 1.5 + 15
    told = {"killed": "disappeared: no sign of life for 10 s", "raises": "ValueError: a bad row"}
    assert told[how] in said


@pytest.mark.parametrize("ended", ["", "by the script"])
def test_a_trainer_ends_the_group_that_it_made(ended: str, tmp_path: Path) -> None:
    """Torch complains of an NCCL group that nobody ended; a script may still do it itself."""
    script = Path(__file__).parent / "pretend_gpu_alone.py"
    command = [sys.executable, str(script), str(tmp_path), ended]
    for said in rank_processes.finish(rank_processes.start(command, launcher=with_one_gpu)):
        assert "trained over nccl" in said
        assert "destroy_process_group" not in said


def test_poise_train_runs_on_it(tmp_path: Path) -> None:
    """In pure C++: the group of the environment, over NCCL, trains as one over gloo does."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    settings = {
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "zero": {"stage": 2},
        "model": {"layers": 2, "width": 16, "heads": 2, "sequence_length": 16},
        "data": {"train": [str(tmp_path / "text.txt")]},
        "train": {"max_updates": 4, "log_every": 1, "output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "run.json").write_text(json.dumps(settings))
    program = pretend_gpu.built().parent.parent / "bin" / "poise"

    def on_gpus(rank: int, size: int, port: int) -> dict[str, str]:
        return {**with_one_gpu(rank, size, port), **pretend_gpu.environment_of_programs()}

    lines = {}
    for launcher in (by_torchrun, on_gpus):
        ranks = rank_processes.start(
            [str(program), "train", str(tmp_path / "run.json")], 2, launcher
        )
        said = rank_processes.finish(ranks)[0]
        lines[launcher] = [line.split("norm")[0] for line in said.splitlines() if "loss" in line]
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert "2 ranks over nccl" in said and len(lines[on_gpus]) == 4 + 1
    assert lines[on_gpus] == lines[by_torchrun]
    assert "destroy_process_group" not in said, "torch's complaint of a group that nobody ended"
