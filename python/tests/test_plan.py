"""What the planner says a run will hold, against what the ledger counted."""

from __future__ import annotations

import json

import poise
import pytest
import torch
from poise import _C
from poise.models.byte_gpt import ByteGPT

SMALL = {"layers": 4, "width": 128, "heads": 4, "sequence_length": 128}
SCALARS = 500  # bytes of the loss, its weight and such, which the planner leaves out


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of small operations wait for each other; the planner asks how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(settings: dict) -> dict:
    model = ByteGPT(**{k: v for k, v in settings["model"].items() if k != "builtin"})
    engine = poise.Engine(model, {k: v for k, v in settings.items() if k != "model"})
    shape = (settings["batch"]["micro_batch_size"], settings["model"]["sequence_length"])
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(256, (2, *shape), generator=generator) for _ in range(2)]
    for _ in range(2):
        engine.step(rows, lambda row: (model.loss(row[0], row[1]), row[1].numel()))
    return engine.memory()


def predicted(settings: dict, tmp_path, capfd) -> dict:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(settings))
    assert _C.cli_run(["poise", "plan", str(path), "--json"]) == 0
    return json.loads(capfd.readouterr().out)["as_written"]


@pytest.mark.parametrize(
    ("micro_batch", "policy", "chunk"),
    [
        (1, {"policy": "none"}, 0),
        (4, {"policy": "none"}, 0),
        (4, {"policy": "every_n", "n": 1}, 0),
        (4, {"policy": "every_n", "n": 2}, 0),
        (8, {"policy": "sqrt"}, 0),
        (8, {"policy": "every_n", "n": 1}, 64),
    ],
)
def test_every_account_of_the_peak_is_as_predicted(micro_batch, policy, chunk, tmp_path, capfd):
    settings = {
        "model": {"builtin": "byte_gpt", **SMALL, "loss_chunk_tokens": chunk},
        "batch": {"micro_batch_size": micro_batch, "accumulation": 2},
        "checkpointing": policy,
    }
    ours, theirs = predicted(settings, tmp_path, capfd), measured(settings)
    assert ours["peak_bytes"] == pytest.approx(theirs["peak_bytes"], abs=SCALARS)
    for account, held in theirs["at_peak"].items():
        assert ours["at_peak"][account] == pytest.approx(held, abs=SCALARS), account


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"checkpointing": {"policy": "selective"}}, 0.02),
        ({"precision": {"dtype": "bf16", "parameters": "bf16"}}, 0.01),
        ({"precision": {"dtype": "bf16"}}, 0.05),  # autocast keeps the residual in fp32
    ],
)
def test_estimates_are_as_far_off_as_the_docs_say(changes, error, tmp_path, capfd):
    settings = {
        "model": {"builtin": "byte_gpt", **SMALL},
        "batch": {"micro_batch_size": 4, "accumulation": 2},
        **changes,
    }
    ours, theirs = predicted(settings, tmp_path, capfd), measured(settings)
    assert ours["peak_bytes"] == pytest.approx(theirs["peak_bytes"], rel=error)


def test_a_budget_is_kept_and_named(tmp_path, capfd):
    settings = {
        "model": {"builtin": "byte_gpt", **SMALL},
        "batch": {"micro_batch_size": 16},
        "memory": {"budget_bytes": "48MiB"},
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(settings))
    assert _C.cli_run(["poise", "plan", str(path), "--json"]) == 1  # as written it does not fit
    answer = json.loads(capfd.readouterr().out)
    best = answer["best"]
    assert answer["fits"]
    assert best["peak_bytes"] <= 48 * 2**20 < answer["as_written"]["peak_bytes"]
    assert best["micro_batch_size"] * best["accumulation"] == 16


def test_a_run_that_offloads_is_refused(tmp_path, capfd):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": SMALL, "offload": {"gradients": "host"}}))
    assert _C.cli_run(["poise", "plan", str(path)]) != 0
    assert "[plan] the run offloads, which plans do not count yet" in capfd.readouterr().err
