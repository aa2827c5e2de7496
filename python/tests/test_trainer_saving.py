"""poise.Trainer's checkpoints: resumed runs are the unbroken one, folders open elsewhere."""

import dataclasses
import json
import os
import random
import signal

import numpy
import poise
import pytest
import torch
from poise import signals
from poise.callbacks import TrainerState
from poise.trainer_saving import last_checkpoint
from test_trainer import Rows
from tiny_models import TinyForCausalLM, same_bits, tiny
from torch.utils.data import Dataset


class Noisy(Dataset):
    """Samples that draw from torch's own generator when they are read."""

    def __init__(self, size=11):
        self.rows = Rows(size)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = dict(self.rows[index])
        if torch.rand(()) < 0.5:
            row["labels"] = row["labels"].flip(0)
        return row


def trainer(folder, dataset=None, callbacks=(), seed=0, model=None, judged=None, **changes):
    base = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,  # 11 samples: windows of 4, 4, 3
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = poise.TrainingArguments(str(folder), **{**base, **changes})
    data = Noisy() if dataset is None else dataset
    model = tiny(dropout=0.2, seed=seed) if model is None else model
    return poise.Trainer(
        model, args, train_dataset=data, eval_dataset=judged, callbacks=list(callbacks)
    )


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train_runtime" not in line]  # a run's last one
    measured = (
        "peak_bytes",
        "memory_percent",
        "accounts",
        "host_bytes",
        "eval_runtime",
    )
    return [
        {k: v for k, v in line.items() if k not in measured and not k.endswith("_per_second")}
        for line in lines
    ]


def names(folder):
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("checkpoint-"))


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_every_checkpoint_is_resumed_to_the_bit(tmp_path, strategy, precision):
    changes = {"save_strategy": strategy, "save_steps": 2, **precision}
    plain = trainer(tmp_path / "plain", save_strategy="no", **precision)
    want = plain.train()
    whole = trainer(tmp_path / "whole", **changes)
    got = whole.train()
    assert got.training_loss == want.training_loss  # saving changes nothing
    assert same_bits(whole.model, plain.model)
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "plain")
    steps = [2, 4, 6, 8, 9] if strategy == "steps" else [3, 6, 9]
    assert names(tmp_path / "whole") == [f"checkpoint-{n}" for n in steps]
    for step in steps:
        torch.manual_seed(step)
        resumed = trainer(tmp_path / "whole", seed=5, **changes)
        path = tmp_path / "whole" / f"checkpoint-{step}"
        output = resumed.train(resume_from_checkpoint=str(path))
        assert output.global_step == 9
        assert output.training_loss == want.training_loss, step
        assert same_bits(resumed.model, whole.model), step
        assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "plain"), step


def test_true_is_the_latest_and_auto_needs_one(tmp_path):
    with pytest.raises(poise.Error, match="no whole save in"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    trainer(tmp_path, max_steps=4, save_steps=3).train()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path, resume_from_checkpoint=True, save_strategy="no")
    assert resumed.train().global_step == 9
    assert [line["step"] for line in lines_of(tmp_path)] == [2, 4, 6, 8, 9]


def test_defaults_save_at_the_end_and_keep_the_limit(tmp_path):
    trainer(tmp_path / "default").train()
    assert names(tmp_path / "default") == ["checkpoint-9"]
    trainer(tmp_path / "limit", save_steps=2, save_total_limit=2).train()
    assert names(tmp_path / "limit") == ["checkpoint-8", "checkpoint-9"]
    trainer(tmp_path / "ratio", save_steps=0.5).train()
    assert names(tmp_path / "ratio") == ["checkpoint-5", "checkpoint-9"]


def test_trainer_state_has_the_names_of_transformers(tmp_path):
    trainer(tmp_path, save_steps=4).train()
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"], state["num_train_epochs"]) == (4, 9, 3)
    assert state["epoch"] == pytest.approx(4 / 3)
    assert [line["step"] for line in state["log_history"]] == [2, 4]
    transformers = pytest.importorskip("transformers")
    of_theirs = {field.name for field in dataclasses.fields(transformers.TrainerState)}
    assert of_theirs - {field.name for field in dataclasses.fields(TrainerState)} == set()
    read = transformers.TrainerState.load_from_json(
        tmp_path / "checkpoint-4" / "trainer_state.json"
    )
    assert (read.global_step, read.max_steps) == (4, 9)


class DrawsWhenJudged(TinyForCausalLM):
    """As one that samples in eval mode."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(dropout=0.2)

    def forward(self, input_ids, labels):
        if not self.training:
            draw()
        return super().forward(input_ids, labels)


def draw():
    torch.rand(3), random.random(), numpy.random.rand()


class Samples(poise.TrainerCallback):
    """Draws at every event between updates."""

    def on_epoch_begin(self, args, state, control, **details):
        draw()

    on_epoch_end = on_evaluate = on_save = on_log = on_epoch_begin


@pytest.mark.parametrize("evaluated", ["steps", "epoch"])
@pytest.mark.parametrize("saved", ["steps", "epoch"])
def test_what_evaluations_and_callbacks_draw_is_no_matter_of_the_training(
    tmp_path, evaluated, saved
):
    def run(folder, **changes):
        args = {"save_steps": 1, "save_strategy": saved, "eval_steps": 2, "num_train_epochs": 2}
        made = trainer(
            folder, None, [Samples()], model=DrawsWhenJudged(), judged=Rows(3), **args | changes
        )
        made.train()
        return made

    whole = run(tmp_path / "whole", eval_strategy=evaluated)
    lines = lines_of(tmp_path / "whole")
    assert sum("eval_loss" in line for line in lines) == (3 if evaluated == "steps" else 2)
    without = run(tmp_path / "without", eval_strategy="no")
    assert same_bits(without.model, whole.model)
    for name in names(tmp_path / "whole"):
        path = str(tmp_path / "whole" / name)
        resumed = run(tmp_path / "whole", eval_strategy=evaluated, resume_from_checkpoint=path)
        assert same_bits(resumed.model, whole.model), name
        assert lines_of(tmp_path / "whole") == lines, name


class Asks(poise.TrainerCallback):
    def __init__(self, at):
        self.at, self.saves = at, []

    def on_step_end(self, args, state, control, **details):
        control.should_save = state.global_step == self.at

    def on_save(self, args, state, control, **details):
        self.saves.append(state.global_step)


def test_a_callback_may_ask(tmp_path):
    asks = Asks(5)
    trainer(tmp_path, callbacks=[asks], save_strategy="no").train()
    assert asks.saves == [5] and names(tmp_path) == ["checkpoint-5"]


class Kills(poise.TrainerCallback):
    def __init__(self, number, at):
        self.number, self.at = number, at

    def on_step_end(self, args, state, control, **details):
        if state.global_step == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends(tmp_path, number):
    plain = trainer(tmp_path / "plain", save_strategy="no")
    plain.train()
    stopped = trainer(tmp_path / "out", callbacks=[Kills(number, 5)])
    with pytest.raises(signals.Interrupted) as caught:
        stopped.train()
    assert caught.value.number == number
    assert caught.value.code == 128 + number  # of the process, where nobody catches it
    assert names(tmp_path / "out") == ["checkpoint-5"]
    assert signal.getsignal(number) is signal.SIG_DFL
    resumed = trainer(tmp_path / "out", seed=3, resume_from_checkpoint=True)
    resumed.train()
    assert same_bits(resumed.model, plain.model)
    assert lines_of(tmp_path / "out") == lines_of(tmp_path / "plain")


def test_asynchronous_saves_are_the_same(tmp_path):
    trainer(tmp_path / "wait", save_steps=3).train()
    trainer(tmp_path / "behind", save_steps=3, save_asynchronous=True).train()
    for name in names(tmp_path / "wait"):
        assert poise._C.save_differences(
            str(tmp_path / "wait" / name), str(tmp_path / "behind" / name)
        ) == []  # fmt: skip


def test_a_checkpoint_of_an_engine_is_refused(tmp_path):
    engine = poise.Engine(tiny(), {})
    engine.save(tmp_path, name="checkpoint-1")
    with pytest.raises(poise.Error, match="no checkpoint of a Trainer"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_transformers_model_opens_elsewhere(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=13, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    args = poise.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True
    )
    poise.Trainer(model, args, train_dataset=Rows(8)).train()
    folder = tmp_path / "checkpoint-2"
    opened = transformers.GPT2LMHeadModel.from_pretrained(folder)
    for (name, ours), theirs in zip(
        model.state_dict().items(), opened.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert opened.lm_head.weight is opened.transformer.wte.weight
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [entry["name"] for entry in manifest["files"]]
    assert {"config.json", "model.safetensors", "trainer_state.json"} <= set(files)
