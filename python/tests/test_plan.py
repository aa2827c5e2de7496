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
    ("micro_batch", "policy"),
    [
        (1, {"policy": "none"}),
        (4, {"policy": "none"}),
        (4, {"policy": "every_n", "n": 1}),
        (4, {"policy": "every_n", "n": 2}),
    ],
)
def test_every_account_of_the_peak_is_as_predicted(micro_batch, policy, tmp_path, capfd):
    settings = {
        "model": {"builtin": "byte_gpt", **SMALL},
        "batch": {"micro_batch_size": micro_batch, "accumulation": 2},
        "checkpointing": policy,
    }
    ours, theirs = predicted(settings, tmp_path, capfd), measured(settings)
    assert ours["peak_bytes"] == pytest.approx(theirs["peak_bytes"], abs=SCALARS)
    for account, held in theirs["at_peak"].items():
        assert ours["at_peak"][account] == pytest.approx(held, abs=SCALARS), account


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
