"""A whole run through poise.Trainer, against a plain loop and against its own arithmetic."""

import collections
import json
import logging
import math
import os
import signal

import poise
import pytest
import torch
from poise import _C, banner, trainer_data
from poise.model_call import ModelCall
from poise.run_length import RunLength
from tiny_models import batch, counted, same_bits, tiny
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Rows(Dataset):
    """Samples of TinyForCausalLM, with masked labels."""

    def __init__(self, size=10, seed=1):
        whole = batch(size, 12, seed=seed, masked=0.3)
        self.rows = [{name: tensor[i] for name, tensor in whole.items()} for i in range(size)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def arguments(folder, **changes):
    base = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return poise.TrainingArguments(str(folder), **{**base, **changes})


def all_lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lines_of(folder):
    """Without a run's last one, which has its times."""
    return [line for line in all_lines_of(folder) if "train_runtime" not in line]


# The run.


def test_run_counts_updates_epochs_and_tokens(tmp_path):
    data = Rows(10)  # 5 micro-batches: windows of 2, 2, 1
    output = poise.Trainer(tiny(), arguments(tmp_path), train_dataset=data).train()
    step, loss, metrics = output
    assert (step, output.global_step) == (6, 6)
    total = sum((row["labels"][1:] != -100).sum().item() for row in data.rows)
    assert metrics["train_tokens"] == 2 * total
    assert metrics["epoch"] == 2
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[2]["epoch"] == 1.0
    assert loss == pytest.approx(sum(line["loss"] for line in lines) / 6)
    assert [line["learning_rate"] for line in lines] == pytest.approx(
        [1e-2 * (6 - i) / 6 for i in range(6)]
    )
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_run_is_the_engine_over_the_same_windows(tmp_path):
    args, data = arguments(tmp_path), Rows(10)
    model, by_hand = tiny(), tiny()
    poise.Trainer(model, args, train_dataset=data).train()
    engine = poise.Engine(by_hand, args.to_config(6))
    windows = trainer_data.train_windows(data, args)
    for _, window in zip(range(6), windows, strict=False):
        engine.step(window, lambda piece: (by_hand(**piece), counted(piece)))
    assert same_bits(model, by_hand)


def test_same_run_twice_is_the_same_to_the_bit(tmp_path):
    models = [tiny(dropout=0.2), tiny(dropout=0.2)]
    for model in models:
        poise.Trainer(model, arguments(tmp_path), train_dataset=Rows()).train()
    assert same_bits(*models)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}])
def test_split_changes_the_run_to_rounding_only(tmp_path, precision):
    losses = []
    for micro in (8, 4, 2):
        args = arguments(tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=1,
                         global_batch_size=8, **precision)  # fmt: skip
        losses.append(poise.Trainer(tiny(), args, train_dataset=Rows(24)).train().training_loss)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-2 if precision else 1e-5)


def test_max_steps_cuts_and_extends(tmp_path):
    assert (
        poise.Trainer(tiny(), arguments(tmp_path, max_steps=4), train_dataset=Rows(10))
        .train()
        .global_step
        == 4
    )
    assert (
        poise.Trainer(tiny(), arguments(tmp_path, max_steps=8), train_dataset=Rows(10))
        .train()
        .global_step
        == 8
    )


def test_second_train_starts_anew(tmp_path):
    trainer = poise.Trainer(tiny(), arguments(tmp_path), train_dataset=Rows())
    assert trainer.train().global_step == trainer.train().global_step == 6


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_with_workers_made_after_an_engine(tmp_path, method):
    model = tiny()
    engine = poise.Engine(tiny())
    loader = DataLoader(Rows(6), batch_size=2, num_workers=1, multiprocessing_context=method)
    output = poise.Trainer(
        model, arguments(tmp_path, num_train_epochs=1), train_dataset=loader
    ).train()
    assert output.global_step == 2 and engine.updates == 0


def test_data_without_length(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Rows(6).rows)

    assert (
        poise.Trainer(tiny(), arguments(tmp_path, max_steps=5), train_dataset=Stream())
        .train()
        .global_step
        == 5
    )
    with pytest.raises(poise.Error, match="max_steps"):
        poise.Trainer(tiny(), arguments(tmp_path), train_dataset=Stream()).train()


@pytest.mark.parametrize(
    "data, words", [([], "train_dataset is empty"), (None, "no train_dataset")]
)
def test_no_data(tmp_path, data, words):
    with pytest.raises(poise.Error, match=words):
        poise.Trainer(tiny(), arguments(tmp_path), train_dataset=data).train()


# What a model may return, and what counts.


class Scores(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.layer = form, nn.Linear(3, 4)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits, labels)
        return {"tensor": loss, "tuple": (loss, logits), "dict": {"loss": loss, "logits": logits}}[
            self.form
        ]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_forms_of_outputs(form):
    inputs = {"x": torch.ones(5, 3), "labels": torch.tensor([0, 1, -100, 2, 3])}
    loss = ModelCall(Scores(form))(inputs)
    assert float(loss.count) == 4
    assert float(loss.value.detach()) == pytest.approx(float(Scores("tensor")(**inputs).detach()))


def test_compute_loss_func_gets_outputs_and_labels():
    def by_mean(outputs, labels, num_items_in_batch=None):
        assert num_items_in_batch == 4  # the micro-batch's own: a sum over it is a mean
        return nn.functional.cross_entropy(outputs["logits"], labels)

    inputs = {"x": torch.ones(5, 3), "labels": torch.tensor([0, 1, -100, 2, 3])}
    loss = ModelCall(Scores("dict"), by_mean)(inputs)
    assert float(loss.count) == 4 and loss.value.requires_grad


def test_what_counts():
    labels = torch.tensor([[1, 2, -100], [-100, 3, 4]])
    causal, other = ModelCall(tiny()), ModelCall(Scores("tensor"))
    assert (
        int(causal.count({"input_ids": labels, "labels": labels})) == 3
    )  # the first of a row is no target
    assert int(other.count({"x": labels, "labels": labels})) == 4
    assert other.count((torch.ones(7, 3), torch.ones(7))) == 7  # no integer labels: samples
    assert other.count({"x": torch.ones(7, 3)}) == 7
    assert int(ModelCall(tiny(), shift_labels=False).count({"labels": labels})) == 4


def test_output_without_a_loss(tmp_path):
    data = [{"x": torch.ones(3)}] * 4
    with pytest.raises(poise.Error, match="has x but no labels, and the model returned no loss"):
        poise.Trainer(Scores("dict"), arguments(tmp_path), train_dataset=data).train()


# Evaluation.


def test_evaluation_is_weighed_by_tokens(tmp_path):
    model, data = tiny(), Rows(10, seed=5)
    model.train()
    values = []
    for size in (10, 3, 1):
        args = arguments(tmp_path, per_device_eval_batch_size=size)
        values.append(poise.Trainer(model, args, eval_dataset=data).evaluate())
    whole = batch(10, 12, seed=5, masked=0.3)
    expected = float(model.double()(**whole).detach())
    assert [v["eval_loss"] for v in values] == pytest.approx([expected] * 3, rel=1e-6)
    assert values[0]["eval_tokens"] == counted(whole)
    assert all(module.training for module in model.modules())


def test_evaluation_during_the_run_changes_no_bit(tmp_path):
    plain, evaluated = tiny(dropout=0.2), tiny(dropout=0.2)
    poise.Trainer(plain, arguments(tmp_path / "a"), train_dataset=Rows()).train()
    args = arguments(tmp_path / "b", eval_strategy="steps", eval_steps=2)
    poise.Trainer(evaluated, args, train_dataset=Rows(), eval_dataset=Rows(4, seed=9)).train()
    assert same_bits(plain, evaluated)
    assert [line["step"] for line in lines_of(tmp_path / "b") if "eval_loss" in line] == [2, 4, 6]


def test_evaluation_needs_data(tmp_path):
    with pytest.raises(poise.Error, match="no eval_dataset"):
        poise.Trainer(tiny(), arguments(tmp_path, eval_strategy="epoch"), train_dataset=Rows())
    with pytest.raises(poise.Error, match="no eval_dataset"):
        poise.Trainer(tiny(), arguments(tmp_path)).evaluate()


# Trouble.


def test_nonfinite_loss_stops_or_is_counted(tmp_path):
    class Spoiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = tiny(), 0

        def forward(self, **inputs):
            self.calls += 1
            return self.inner(**inputs) * (float("nan") if self.calls == 3 else 1.0)

    with pytest.raises(poise.Error, match="finite"):
        poise.Trainer(Spoiled(), arguments(tmp_path), train_dataset=Rows()).train()
    args = arguments(tmp_path / "skip", on_nonfinite="skip", logging_steps=100)
    output = poise.Trainer(Spoiled(), args, train_dataset=Rows()).train()
    assert output.metrics["skipped_updates"] == 1 and math.isfinite(output.training_loss)
    lines = lines_of(tmp_path / "skip")  # a skipped update is always written
    assert [(line["step"], line["status"]) for line in lines] == [
        (2, "nonfinite_loss"),
        (6, "applied"),
    ]


def test_ctrl_c_ends_the_run_cleanly(tmp_path):
    class Interrupts:
        def on_step_end(self, args, state, control, **details):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    model = tiny()
    trainer = poise.Trainer(
        model, arguments(tmp_path), train_dataset=Rows(), callbacks=[Interrupts()]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.engine.micro_batches == 0 and trainer.engine.updates == 2
    assert [line["step"] for line in lines_of(tmp_path)][:1] == [1]
    trainer.callbacks.clear()
    assert trainer.train().global_step == 6


def test_callbacks_see_the_run_and_can_end_it(tmp_path):
    class Recorder(poise.TrainerCallback):
        def __init__(self):
            self.events = []

        def on_train_begin(self, args, state, control, **details):
            self.events.append(("begin", state.max_steps))

        def on_step_end(self, args, state, control, **details):
            self.events.append((state.global_step, str(details["result"].status)))
            control.should_training_stop = state.global_step == 2

        def on_train_end(self, args, state, control, **details):
            self.events.append(("end", state.global_step))

    recorder = Recorder()
    output = poise.Trainer(
        tiny(), arguments(tmp_path), train_dataset=Rows(), callbacks=[recorder]
    ).train()
    assert output.global_step == 2
    assert recorder.events == [("begin", 6), (1, "applied"), (2, "applied"), ("end", 2)]


# What is shown.


def test_banner_has_the_arithmetic(tmp_path, capsys):
    args = arguments(tmp_path, disable_tqdm=None, bf16=True, gradient_checkpointing=True)
    model = tiny()
    model.embedding.weight.requires_grad_(False)
    poise.Trainer(model, args, train_dataset=Rows(10)).train()
    text = capsys.readouterr().err
    total = sum(p.numel() for p in model.parameters())
    assert "micro-batch 2 x accumulation 2 x ranks 1 = global batch 4" in text
    assert "10 examples, 3 updates an epoch, 6 updates in 2 epochs" in text
    assert f"{total - 13 * 16:,} of {total:,} parameters are trained" in text
    assert "kept in fp32, masters fp32, forward bf16 (autocast)" in text
    assert "recomputed blocks: every_n" in text


def test_without_the_bar_the_lines_stay(tmp_path, capsys):
    poise.Trainer(tiny(), arguments(tmp_path, disable_tqdm=True), train_dataset=Rows(10)).train()
    text = capsys.readouterr().err
    assert "= global batch 4" in text and "update 6/6" in text
    assert "update/s" not in text  # the bar


def test_log_level_error_shows_nothing(tmp_path, capsys):
    args = arguments(tmp_path, disable_tqdm=True, log_level="error")
    poise.Trainer(tiny(), args, train_dataset=Rows(10)).train()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.bfloat16, "bfloat16"), (torch.float64, "float64"), (None, None)]
)
def test_parameters_of_another_type_are_told(dtype, said, tmp_path, capsys):
    model = tiny().to(dtype) if dtype else tiny()
    poise.Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=Rows(4)).train()
    line = f"parameters came in {said} and are kept in float32 from now on"
    assert (line in capsys.readouterr().err) == (said is not None)


def test_attention_backend_is_shown(tmp_path, capsys):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.layer(x)[:, None]
            return (
                nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
                .square()
                .mean()
            )

    data = [{"x": torch.ones(4, 8)}] * 8
    poise.Trainer(Attention(), arguments(tmp_path, disable_tqdm=None), train_dataset=data).train()
    assert "attention: scaled_dot_product_attention by " in capsys.readouterr().err


def test_batch_norm_with_accumulation_is_warned_of_once(tmp_path, caplog):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            return self.layer(x).square().mean()

    data = [{"x": torch.randn(3)} for _ in range(8)]
    with caplog.at_level(logging.WARNING, logger="poise"):
        poise.Trainer(Normed(), arguments(tmp_path), train_dataset=data).train()
    assert [r.getMessage() for r in caplog.records].count(
        next(
            r.getMessage()
            for r in caplog.records
            if "1 BatchNorm layers (layer.1" in r.getMessage()
        )
    ) == 1
    caplog.clear()
    banner.warn_batch_norm(Normed(), accumulation=1)
    assert not caplog.records


def test_log_lines_do_not_break_the_bar(tmp_path, capsys):
    class Speaks:
        def on_step_end(self, args, state, control, **details):
            _C.log_write(1, f"line of the core {state.global_step}")

    args = arguments(tmp_path, disable_tqdm=False)
    poise.Trainer(tiny(), args, train_dataset=Rows(10), callbacks=[Speaks()]).train()
    lines = [line.split("\r")[-1].strip() for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if line.startswith("line of the core")] == [
        f"line of the core {i}" for i in range(1, 7)
    ]
    assert any(
        "loss=" in line and "tok/s=" in line and "mem=" in line and "6/6" in line for line in lines
    )


def ranges_of(path):
    """How often each range of poise's stands in a trace."""
    trace = json.loads(path.read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    return collections.Counter(name for name in names if name.startswith("poise::"))


ONCE = ("data", "open_window", "sum_up", "factor", "optimizer", "loss_scale", "result", "update")
EACH = ("forward", "weigh_loss", "backward")


def stops_of(updates, micro_batches):
    return {f"poise::{name}": updates for name in ONCE} | {
        f"poise::{name}": micro_batches for name in EACH
    }


def test_profile_steps_write_a_trace_with_the_stops(tmp_path):
    data = Rows(10)  # windows of 2, 2, 1 micro-batches
    poise.Trainer(tiny(), arguments(tmp_path, profile_steps="2-3"), train_dataset=data).train()
    assert ranges_of(tmp_path / "trace_2_3.json") == stops_of(updates=2, micro_batches=3)


def test_a_loop_of_ones_own_has_the_stops_too(tmp_path):
    model = tiny()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        engine = poise.Engine(model, {"batch": {"accumulation": 2}})
        for piece in next(poise.data.WindowIterator(Rows(4), 2, 2)):
            engine.backward(engine(**piece), tokens=counted(piece))
        engine.step()
        engine.save(tmp_path / "state")
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    expected = stops_of(updates=1, micro_batches=2) | {"poise::build": 1, "poise::save": 1}
    assert ranges_of(tmp_path / "trace.json") == expected


def test_memory_budget_is_enforced(tmp_path):
    args = arguments(tmp_path, memory_budget="10KiB")
    with pytest.raises((torch.OutOfMemoryError, poise.Error)):
        poise.Trainer(tiny(), args, train_dataset=Rows()).train()


def test_window_end_of_epoch_is_the_formula(tmp_path):
    """The short last window is the mean over its own tokens, not over a full window's."""
    run = RunLength.of(5, arguments(tmp_path))
    assert run.updates_per_epoch == 3
    model, reference = tiny(), tiny().double()
    args = arguments(
        tmp_path,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
    )
    poise.Trainer(model, args, train_dataset=Rows(6)).train()
    whole = batch(6, 12, seed=1, masked=0.3)
    expected = float(reference(**whole).detach())
    assert lines_of(tmp_path)[-1]["loss"] == pytest.approx(expected, rel=1e-6)
