"""poise.deepspeed.monitor: an engine's figures and a script's own events, by DeepSpeed's names and files."""

import csv
import logging
import sys
import types

import poise
import poise.deepspeed as deepspeed
import pytest
import rank_processes
import torch
from poise.deepspeed.monitor.config import get_monitor_config
from poise.deepspeed.monitor.csv_monitor import csvMonitor
from poise.deepspeed.monitor.monitor import MonitorMaster
from poise.deepspeed.monitor.tensorboard import TensorBoardMonitor
from poise.deepspeed.runtime.config import DeepSpeedConfig
from test_deepspeed import WithLoss, config, in_pieces, run
from torch.nn.functional import cross_entropy
from wrapped_loops import network, plain, rows

pytestmark = pytest.mark.usefixtures("one_thread")


def lines(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def to_csv(folder, **more):
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "j"}, **more}


def test_an_engine_writes_loss_and_rate_of_every_update(tmp_path):
    data, reference = rows(24), network(dtype=torch.float64)
    losses = []
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in in_pieces(data, 8):
        losses.append(float(cross_entropy(reference(x.double()), y).detach()))
        plain(reference, sgd, [(x, y)])
    warm = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_min_lr": 0.1}}
    engine, *_ = deepspeed.initialize(
        model=WithLoss(), config=to_csv(tmp_path, **config(scheduler=warm))
    )
    assert engine.monitor.enabled
    run(engine, in_pieces(data, 2))
    header, *written = lines(tmp_path / "j" / "Train_Samples_train_loss.csv")
    assert header == ["step", "train_loss"]
    # A loss stands where its update began, as DeepSpeed has it.
    assert [int(step) for step, _ in written] == [0, 8, 16]
    assert [float(value) for _, value in written] == pytest.approx(losses, rel=1e-5)
    assert lines(tmp_path / "j" / "Train_Samples_lr.csv") == [
        ["step", "lr"],
        *([str(step), "0.1"] for step in (8, 16, 24)),
    ]
    assert not (tmp_path / "j" / "Train_Samples_loss_scale.csv").exists()


def test_with_fp16_the_scale_too(tmp_path):
    fp16 = {"enabled": True, "loss_scale": 64}
    settings = to_csv(tmp_path, **config(gradient_accumulation_steps=1, fp16=fp16))
    engine, *_ = deepspeed.initialize(model=WithLoss(), config=settings)
    run(engine, in_pieces(rows(2), 2))
    assert lines(tmp_path / "j" / "Train_Samples_loss_scale.csv")[1:] == [["2", "64.0"]]


def test_a_scripts_own_events_go_to_all_that_are_on(tmp_path, monkeypatch):
    logged = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **given: (
        logged.append(given)
        or types.SimpleNamespace(log=lambda numbers, step: logged.append((numbers, step)))
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    file = to_csv(
        tmp_path,
        train_batch_size=2,
        tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "tb"},
        wandb={"enabled": True, "project": "p", "team": "t"},
    )
    monitor = MonitorMaster(DeepSpeedConfig(file).monitor_config)
    monitor.write_events([("Eval/my loss", torch.tensor(0.5), 3), ("plain", 2, 3)])
    monitor.write_events([("plain", 1.5, 4)])
    assert lines(tmp_path / "j" / "Eval_my_loss.csv") == [["step", "my loss"], ["3", "0.5"]]
    assert lines(tmp_path / "j" / "plain.csv") == [["step", "plain"], ["3", "2.0"], ["4", "1.5"]]
    assert logged == [
        {"project": "p", "group": None, "entity": "t"},
        ({"Eval/my loss": 0.5}, 3),
        ({"plain": 2.0}, 3),
        ({"plain": 1.5}, 4),
    ]
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    read = event_accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("plain")] == [(3, 2.0), (4, 1.5)]


def test_a_run_that_goes_on_writes_no_second_header(tmp_path):
    settings = get_monitor_config(to_csv(tmp_path)).csv_monitor
    for step in (1, 2):
        csvMonitor(settings).write_events([("a", step, step)])
    assert lines(tmp_path / "j" / "a.csv") == [["step", "a"], ["1", "1.0"], ["2", "2.0"]]


def test_what_is_off_writes_nothing_and_only_the_first_rank_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine, *_ = deepspeed.initialize(model=WithLoss(), config=config())
    assert not engine.monitor.enabled
    engine.monitor.write_events([("a", 1, 1)])
    for name, value in rank_processes.by_torchrun(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    TensorBoardMonitor(get_monitor_config({"tensorboard": {"enabled": True}}).tensorboard)
    MonitorMaster(get_monitor_config(to_csv(tmp_path))).write_events([("a", 1, 1)])
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_an_error():
    with pytest.raises(
        poise.Error, match="csv_monitor has no ouput_path; use enabled, output_path"
    ):
        get_monitor_config({"csv_monitor": {"ouput_path": "x"}})
    with pytest.raises(poise.Error, match="MonitorMaster got dict; give"):
        MonitorMaster({"csv_monitor": {"enabled": True}})


def test_a_missing_wandb_is_named_by_the_key_that_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = get_monitor_config({"wandb": {"enabled": True}})
    with pytest.raises(poise.Error, match=r"\[deepspeed\] wandb.enabled, but wandb cannot be"):
        MonitorMaster(settings)


def test_a_trainer_says_that_it_writes_by_report_to(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "poise"):
        poise.TrainingArguments(str(tmp_path), deepspeed=to_csv(tmp_path))
    assert "monitors write nothing in a Trainer: report_to says" in caplog.text
