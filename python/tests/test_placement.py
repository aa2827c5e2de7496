"""Stage and place of the optimizer's states, found where a run leaves them open."""

from __future__ import annotations

import copy
import json
import re
import types

import poise
import pytest
import rank_processes
import torch
from balanced_runs import FUNCTION, Net, batch_of, held, samples, train
from poise import cli, placement
from poise.config import settings_of
from poise.forecast import Forecast
from poise.misfit import NothingFits
from poise.placement import Placement, Task

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SCRATCH = 200_000  # bytes of a small micro-batch


def offload_of(engine):
    return settings_of(engine.config)["offload"]["optimizer"]


def test_states_go_to_the_host_only_where_nothing_fits_otherwise(tmp_path, capsys):
    states = held(Net())
    whole, loss = train(tmp_path / "whole", memory_budget="64MiB")
    assert offload_of(whole.engine) == "none"
    tight = int(0.9 * states)  # the states alone are more
    trainer, found = train(tmp_path / "tight", memory_budget=tight, disable_tqdm=False)
    assert offload_of(trainer.engine) == "host"
    assert trainer.args.offload_optimizer == "host"
    assert trainer.engine.memory()["peak_bytes"] <= tight
    assert found == pytest.approx(loss, rel=1e-5)
    assert "; optimizer states on the host" in capsys.readouterr().err


def test_what_does_not_fit_after_all_goes_there_too(tmp_path):
    # States fit, but leave no room for a micro-batch: found out by running it.
    trainer, _ = train(tmp_path, memory_budget=held(Net()) + 2000)
    assert offload_of(trainer.engine) == "host"
    assert trainer._found.chosen.peak <= held(Net()) + 2000


def test_an_engine_that_cannot_be_made_is_made_with_states_elsewhere(tmp_path, monkeypatch):
    torch.manual_seed(2)
    model, states = Net(), held(Net())
    given, expected = train(
        tmp_path / "given", copy.deepcopy(model), offload_optimizer="host", memory_budget=4 * states
    )
    # A forecast that is wrong: the engine itself runs out with the states in the budget.
    monkeypatch.setattr(Forecast, "held", lambda *_: 0)
    trainer, found = train(tmp_path / "found", model, memory_budget=int(0.9 * states))
    assert offload_of(trainer.engine) == "host" and offload_of(given.engine) == "host"
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_engine_that_cannot_be_made_anywhere_is_told_with_what_would_do(tmp_path, monkeypatch):
    model = Net()
    before = copy.deepcopy(model)
    monkeypatch.setattr(Forecast, "held", lambda *_: 0)
    with pytest.raises(
        NothingFits,
        match=r"the engine itself ran out of memory while it was made.*nearest budget that works",
    ):
        train(tmp_path, model, memory_budget=1000)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("given", [{"offload_optimizer": "none"}, {"optim": "adafactor"}])
def test_what_is_given_or_cannot_leave_stays(tmp_path, given):
    args = poise.TrainingArguments(
        str(tmp_path), use_cpu=True, memory_budget="64MiB", global_batch_size=8, **given
    )
    assert args.open_placements == [Placement(0, False, "none")]


def test_a_given_torch_optimizer_stays_where_it_is(tmp_path):
    model = Net()
    args = poise.TrainingArguments(
        str(tmp_path), use_cpu=True, memory_budget="64MiB", global_batch_size=16, max_steps=1
    )
    trainer = poise.Trainer(
        model,
        args,
        train_dataset=samples(),
        optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3), None),
    )
    trainer.train()
    assert placement.of(trainer.args) == Placement()


def test_states_that_never_fit_are_named(tmp_path):
    with pytest.raises(
        poise.Error,
        match=r"held between micro-batches takes .* that 1 rank may have .*; the nearest budget that works",
    ):
        train(tmp_path, memory_budget=1000)


def task(ranks, budget, **changes):
    usual = {"optimizer": "adamw", "momentum": 0.0, "moments": "fp32", "precision": "fp32"}
    return Task(ranks, CPU, global_batch=16 * ranks, budget=budget, **{**usual, **changes})


def order(ranks, budget, model=None, loss=None, stages=(0, 1, 2, 3)):
    model = model or Net()
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    found = placement.choices(stages, ["none", "host"])
    loss = loss or (lambda batch: model(**batch)[0])
    forecast = Forecast(task(ranks, budget), model, blocks, lambda: batch_of(1), loss)
    return placement.in_order(found, forecast)


def test_stages_come_in_the_order_of_their_plans():
    states = held(Net())
    plenty = order(4, 1 << 34)
    assert plenty[0].stage in (1, 2) and plenty[0].optimizer == "none"
    assert [place.optimizer for place in plenty[:4]] == ["none"] * 4  # the host after all else
    assert len(plenty) == 8
    # Parameters and sums whole: no more than half of the states' bytes are sharded at stage 1.
    tight = order(4, int(0.7 * states) + SCRATCH)
    assert tight[0].stage >= 1
    assert Placement(0, False, "none") not in order(4, int(0.9 * states))


def test_a_model_that_cannot_be_traced_is_tried_in_the_order_of_stages(caplog):
    def looks(batch):
        return float(batch["ids"].float().mean()) * torch.ones((), requires_grad=True)

    assert order(2, 1 << 34, loss=looks)[0] == Placement(0, False, "none")
    assert "the lowest stage that holds the states is tried first" in caplog.text


def test_placements_say_what_they_are():
    assert Placement().describe(1) == ""
    assert Placement(2, False, "host").describe(2) == "; stage 2, optimizer states on the host"
    assert "parameters kept for the window" in Placement(3, True, "none").describe(2)


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
def test_poise_train_does_the_same_for_a_model_of_python(tmp_path, capfd, parameters):
    (tmp_path / "placed_net.py").write_text(FUNCTION)
    path = tmp_path / "run.json"
    states = (4 if parameters == "fp32" else 2) + 12 + (4 if parameters == "bf16" else 0)
    elements = 8 * (64 * 64 + 256)
    document = {
        "model": {"import": "placed_net:build"},
        "precision": {"dtype": parameters, "parameters": parameters},
        "batch": {"global_batch_size": 8},
        "memory": {"budget_bytes": states * elements + 3000},
        "train": {"output_dir": str(tmp_path / "out"), "max_updates": 3, "log_every": 1},
    }

    def losses(**changes):
        path.write_text(json.dumps({**document, **changes}))
        assert cli.main(["train", str(path)]) == 0
        printed = capfd.readouterr()
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [row["loss"] for row in rows if "loss" in row], printed.out + printed.err

    found, text = losses()
    assert "; optimizer states on the host" in text
    micro = int(re.search(r"micro-batch (\d+)", text)[1])
    given, _ = losses(batch={"global_batch_size": 8, "micro_batch_size": micro}, memory={})
    assert found == pytest.approx(given, rel=1e-6)  # masters are those of the model that was made


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return rank_processes.run("placement_on_ranks.py", "found", tmp_path_factory.mktemp("found"))


def test_ranks_find_a_stage_that_fits(ranks):
    for of_rank in ranks:
        assert of_rank["wide"]["stage"] < 3
        assert of_rank["tight"]["stage"] >= 1  # whole states leave no room for a trial
        for seen in (of_rank["wide"], of_rank["tight"]):
            assert seen["peak"] <= seen["budget"]
            assert seen["samples"] == 16
        assert of_rank["tight"]["loss"] == pytest.approx(of_rank["wide"]["loss"], rel=1e-5)
        assert of_rank["given"] == 0
    assert f"stage {ranks[0]['tight']['stage']}" in ranks[0]["tight"]["plan"]


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA RTX 5000 Ada Generation", placement.UNKNOWN_GPU),  # and not the CPU
    ],
)
def test_a_gpu_is_planned_as_the_known_one_it_is_or_as_a_usual_one(driver, known, monkeypatch):
    properties = types.SimpleNamespace(name=driver, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert placement._device_name(torch.device("cuda", 0)) == known
    assert placement._device_name(torch.device("cpu")) == "CPU"
