"""Recompute written in C++ inside a Python process: its hooks reach autograd as Python callables, and an
early end of a second run passes through C++ alone. The model is `poise train`'s, run in this process."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from poise import _C

POLICIES = {
    "every_n": ["checkpointing.policy=every_n"],
    "every_second": ["checkpointing.policy=every_n", "checkpointing.n=2"],
    "selective": ["checkpointing.policy=selective"],
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and the dog sat on the cat.\n" * 80)
    run = {
        "model": {"layers": 3, "width": 32, "heads": 2, "sequence_length": 32, "dropout": 0.1},
        "data": {"train": [str(tmp_path / "text.txt")]},
        "batch": {"micro_batch_size": 4, "accumulation": 2},
        "train": {"output_dir": str(tmp_path / "out"), "max_updates": 3, "validation_batches": 0},
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    return tmp_path / "run.json"


def train(run_file: Path, *settings: str) -> tuple[int, dict]:
    """Exit code and summary of a run that C++ drives on this thread."""
    arguments = ["poise", "train", str(run_file)]
    for setting in settings:
        arguments += ["--set", setting]
    code = _C.cli_run(arguments)
    lines = (run_file.parent / "out" / "metrics.jsonl").read_text().splitlines()
    return code, json.loads(lines[-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_bits_as_without(run_file: Path, policy: str) -> None:
    code, plain = train(run_file)
    assert code == 0 and len(plain["losses"]) == 3
    code, recomputed = train(run_file, *POLICIES[policy])
    assert code == 0
    assert recomputed["losses"] == plain["losses"]
    assert recomputed["peak_bytes"] < plain["peak_bytes"]


def test_on_a_thread_of_its_own(run_file: Path) -> None:
    results = []
    worker = threading.Thread(
        target=lambda: results.append(train(run_file, *POLICIES["every_n"])), daemon=True
    )
    worker.start()
    worker.join(120)
    assert results and results[0][0] == 0
    assert results[0][1]["losses"] == train(run_file)[1]["losses"]


def test_no_hook_and_no_error_stay_behind(run_file: Path) -> None:
    code, _ = train(run_file, *POLICIES["every_n"])  # a pending error would surface as SystemError
    assert code == 0
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    assert y.grad_fn._saved_result is y or torch.equal(y.grad_fn._saved_result, y)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_out_of_memory_in_the_second_run_is_told(
    run_file: Path, capfd: pytest.CaptureFixture
) -> None:
    code, whole = train(run_file, *POLICIES["every_n"])
    assert code == 0
    capfd.readouterr()
    for missing in (1, 1 << 10, 1 << 14):  # the peak is in backward, while a block is recomputed
        budget = f"memory.budget_bytes={whole['peak_bytes'] - missing}"
        code, summary = train(run_file, *POLICIES["every_n"], budget)
        assert code == 1
        assert "out of memory" in summary["error"]
        assert "poise: error: [memory] CPU out of memory" in capfd.readouterr().err
    code, again = train(run_file, *POLICIES["every_n"])
    assert code == 0 and again["losses"] == whole["losses"]
