"""What a run shows while it goes on: lines, trackers, spikes, memory and FLOPs, the last line."""

import json
import logging
import math

import poise
import pytest
import torch
import transformers
from hf_models import LENGTH, VOCABULARY, causal_rows, made
from poise import utilization
from poise.spikes import LEAST, Spikes
from test_hf_trainer import arguments, without_strategy
from test_trainer import Rows, all_lines_of, lines_of
from test_trainer import arguments as tiny_arguments
from tiny_models import tiny
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(folder, callbacks=(), **changes):
    trainer = poise.Trainer(
        made("gpt2"),
        arguments(folder, **changes),
        train_dataset=causal_rows(16),
        eval_dataset=causal_rows(4),
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


# The last line.


def test_the_last_line_is_that_of_transformers(tmp_path):
    ends = []

    class Ends(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **details):
            ends[-1].append(("log", "train_runtime" in logs))

        def on_train_end(self, args, state, control, **details):
            ends[-1].append(("end", len(state.log_history)))

    lasts = []
    for kind in (transformers.Trainer, poise.Trainer):
        ends.append([])
        args = without_strategy(
            tmp_path / kind.__module__,
            transformers.TrainingArguments,
            num_train_epochs=2,
            report_to="none",
            save_strategy="no",
        )
        trainer = kind(made("gpt2"), args, train_dataset=causal_rows(16), callbacks=[Ends()])
        output = trainer.train()
        lasts.append(trainer.state.log_history[-1])
        assert {k: output.metrics[k] for k in output.metrics} == {
            k: lasts[-1][k] for k in output.metrics
        }
    theirs, ours = lasts
    assert ends[1] == ends[0]  # lines of updates, the last line, then the end
    assert set(theirs) <= set(ours)
    for name in ("step", "epoch"):
        assert ours[name] == theirs[name]
    assert ours["train_loss"] > 0 and ours["train_runtime"] > 0
    for name in ("train_samples_per_second", "train_steps_per_second"):  # 32 samples, 4 updates
        done = ours[name] * ours["train_runtime"]
        assert done == pytest.approx(theirs[name] * theirs["train_runtime"], rel=0.02)
    assert all_lines_of(tmp_path / "poise.trainer")[-1]["train_runtime"] == ours["train_runtime"]


# Trackers.


class Service:
    """As wandb's run."""

    def __init__(self):
        self.seen = []

    def log(self, numbers, step=None):
        self.seen.append((step, numbers))


def test_what_can_log_gets_every_line(tmp_path):
    service = Service()
    trained(tmp_path, [service], eval_strategy="epoch")
    steps = [step for step, _ in service.seen]
    assert steps == [1, 2, 2, 2]  # two updates, the evaluation, the last line
    lines = lines_of(tmp_path)
    first = service.seen[0][1]
    assert first["train/loss"] == lines[0]["loss"]
    assert first["train/accounts/parameters"] == lines[0]["accounts"]["parameters"] > 0
    assert service.seen[2][1]["eval/loss"] == lines[2]["eval_loss"]
    assert all(isinstance(v, (int, float)) for _, line in service.seen for v in line.values())


def scalars(folder):
    """{name: [(step, value), ...]} of event files, as TensorBoard reads them."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard"
    )
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(one.step, one.value) for one in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_shows_the_lines(tmp_path):
    pytest.importorskip("tensorboard", reason="no tensorboard")
    trained(tmp_path, report_to="tensorboard", eval_strategy="epoch")
    seen, lines = scalars(tmp_path / "runs"), lines_of(tmp_path)
    assert seen["train/loss"] == [(n, pytest.approx(lines[n - 1]["loss"])) for n in (1, 2)]
    assert seen["eval/loss"] == [(2, pytest.approx(lines[2]["eval_loss"]))]
    assert seen["train/train_runtime"][0][0] == 2
    assert seen["train/accounts/activations"][0][1] > 0


@pytest.mark.parametrize("kind", [poise.TrainingArguments, transformers.TrainingArguments])
def test_a_services_own_callback_of_transformers_works(kind, tmp_path):
    pytest.importorskip("tensorboard", reason="no tensorboard")
    args = without_strategy(
        tmp_path, kind, report_to="none", save_strategy="no", num_train_epochs=2
    )
    mine = transformers.integrations.TensorBoardCallback()
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(16), callbacks=[mine])
    trainer.train()
    (folder,) = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    seen = scalars(folder)
    assert [step for step, _ in seen["train/loss"]] == [1, 2, 3, 4]
    assert seen["train/train_loss"][0][1] == pytest.approx(
        trainer.state.log_history[-1]["train_loss"]
    )
    assert json.loads(trainer.args.to_json_string())["learning_rate"] == 1e-2


def test_a_resumed_run_goes_on_in_the_same_curves(tmp_path):
    pytest.importorskip("tensorboard", reason="no tensorboard")
    options = {"report_to": ["tensorboard"], "save_steps": 2, "per_device_train_batch_size": 1}
    options["logging_dir"] = str(tmp_path / "events")
    trained(tmp_path / "run", **options)  # 4 updates, saved at 2 and 4
    args = arguments(tmp_path / "run", **options)
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(16))
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    steps = [step for step, _ in scalars(tmp_path / "events")["train/loss"]]
    assert steps == [1, 2, 3, 4]


# Spikes.


def test_a_value_out_of_the_common_is_told_with_its_update():
    spikes = Spikes()
    for step in range(1, LEAST + 1):
        assert spikes.look(step, {"loss": 2 + 0.1 * (step % 2), "grad_norm": 1.0}) == []
    assert spikes.look(17, {"loss": 2.2, "grad_norm": math.nan}) == []
    mean = sum([*(2 + 0.1 * (step % 2) for step in range(1, 17)), 2.2]) / 17
    (text,) = spikes.look(18, {"loss": 9.0, "grad_norm": 1.0})
    assert text.startswith("update 18: loss 9 is ") and f"mean {mean:.4g} of the last 17" in text
    (text,) = spikes.look(19, {"loss": 2.0, "grad_norm": 30.0})
    assert "update 19: grad_norm 30 is" in text


def test_nothing_is_said_of_the_first_updates_nor_of_a_new_level():
    spikes = Spikes()
    for step in range(LEAST):
        assert spikes.look(step, {"loss": 100.0 * step, "grad_norm": 1.0}) == []
    told = [spikes.look(step, {"loss": 1.0, "grad_norm": 5.0}) for step in range(20, 40)]
    assert [bool(texts) for texts in told] == [True] + [False] * 19


def test_a_resumed_watch_knows_the_last_updates():
    one, other = Spikes(), Spikes()
    for step in range(20):
        one.look(step, {"loss": 1.0 + step % 3, "grad_norm": 1.0})
    other.go_on(json.loads(json.dumps(one.kept())))
    last = {"loss": 50.0, "grad_norm": 1.0}
    assert one.look(21, last) == other.look(21, last) != []


class Jumps(nn.Module):
    """A loss of about 1, at one call of 100."""

    def __init__(self, at):
        super().__init__()
        self.weight, self.at, self.calls = nn.Parameter(torch.ones(1)), at, 0

    def forward(self, x):
        self.calls += 1
        factor = 100.0 if self.calls == self.at else 1.0
        return (self.weight * factor).sum() * x.mean()


def test_a_spike_of_a_run_is_warned_of_and_stands_in_the_next_line(tmp_path, caplog):
    args = arguments(
        tmp_path, gradient_accumulation_steps=1, num_train_epochs=1, learning_rate=1e-6, logging_steps=10
    )  # fmt: skip
    data = [{"x": torch.ones(3)} for _ in range(80)]
    poise.Trainer(Jumps(at=23), args, train_dataset=data).train()
    warned = [r.getMessage() for r in caplog.records if "update 23:" in r.getMessage()]
    assert len(warned) == 2 and "loss 100" in warned[0] and "grad_norm 100" in warned[1]
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines if "spikes" in line] == [30]
    assert lines[2]["spikes"] == [text.removeprefix("[trainer] ") for text in warned]


# Memory and norms.


def test_a_line_tells_norms_accounts_and_how_full_the_memory_is(tmp_path):
    trained(tmp_path, max_grad_norm=0.01, memory_budget="64MiB")
    for line in lines_of(tmp_path)[:2]:
        assert line["grad_norm"] > 0.01
        assert line["clipped_norm"] == pytest.approx(0.01, rel=1e-3)
        assert sum(line["accounts"].values()) <= line["peak_bytes"]
        assert line["memory_percent"] == pytest.approx(100 * line["peak_bytes"] / 2**26, abs=0.01)


def test_without_a_budget_it_is_the_machines_memory(tmp_path):
    trained(tmp_path)
    with open("/proc/meminfo") as file:
        whole = 1024 * int(file.readline().split()[1])
    assert utilization.memory_bytes(0, torch.device("cpu")) == pytest.approx(whole, rel=0.01)
    assert 0 <= lines_of(tmp_path)[0]["memory_percent"] < 1


def test_the_plan_stands_beside_what_was_measured(tmp_path):
    args = poise.TrainingArguments(
        str(tmp_path), global_batch_size=8, memory_budget="64MiB", num_train_epochs=1,
        logging_steps=1, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(16)).train()
    (plan,) = [line["plan"] for line in lines_of(tmp_path) if "plan" in line]
    first = next(line for line in lines_of(tmp_path) if "loss" in line)
    assert plan["measured"] == first["accounts"]
    assert sum(plan["predicted"].values()) == pytest.approx(sum(plan["measured"].values()), rel=0.3)


# FLOPs.


def test_forward_flops_are_those_of_the_formula():
    """2 for each weight of a matrix and token, and attention's two products."""
    model, tokens = made("gpt2").eval(), torch.ones((3, LENGTH), dtype=torch.long)
    with utilization.ForwardFlops() as forward:
        model(tokens)
    matrices = 2 * (4 * 16 * 16 + 2 * 16 * 64) + VOCABULARY * 16  # of two blocks, and the head
    attention = 2 * 2 * 2 * LENGTH * LENGTH * 16  # two blocks, two products
    assert forward.count == 3 * (LENGTH * 2 * matrices + attention)


def test_flops_of_convolutions_are_counted_too():
    with utilization.ForwardFlops() as forward:
        nn.Conv2d(3, 5, 3)(torch.ones(2, 3, 8, 8))
    assert forward.count == 2 * 2 * 6 * 6 * 5 * 3 * 9


@pytest.mark.parametrize("recompute", [False, True])
def test_mfu_is_what_the_model_asks_for_over_the_peak(recompute, tmp_path, monkeypatch):
    trainer = trained(tmp_path, peak_flops=1e12, gradient_checkpointing=recompute, logging_steps=2)
    (line,) = [line for line in lines_of(tmp_path) if "mfu" in line]
    with utilization.ForwardFlops() as forward:
        trainer.model(torch.ones((16, LENGTH), dtype=torch.long))
    last = all_lines_of(tmp_path)[-1]
    assert last["total_flos"] == 3 * forward.count  # recomputation is not the model's
    assert 0 < line["mfu"] < 1
    assert line["mfu"] == pytest.approx(
        last["total_flos"] / 1e12 * line["tokens_per_second"] / line["tokens"], rel=1e-6
    )


def test_frozen_parameters_ask_for_no_gradients_of_weights():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    use = utilization.Utilization(model, peak_flops=1.0)
    use.around(model)(torch.ones(5, 4))
    use.window([torch.ones(5, 4)] * 2)
    assert use.take(1.0) == pytest.approx(10 * 2 * 32 * 2.5)
    assert use.take(1.0) == 0


def test_without_a_peak_there_is_no_mfu(tmp_path):
    trained(tmp_path)
    assert not any("mfu" in line for line in lines_of(tmp_path))
    with pytest.raises(poise.Error, match="peak_flops is -1; give a device's FLOP/s"):
        arguments(tmp_path, peak_flops=-1)


def test_drivers_names_are_found_in_the_planners_table():
    def found(name, gib=80):
        entry = utilization.known_device(name, gib << 30)
        return entry and entry["name"]

    assert found("NVIDIA H100 80GB HBM3") == "H100-80GB"
    assert found("NVIDIA H200", 140) == "H200-141GB"
    assert found("NVIDIA A100-SXM4-40GB", 39) == "A100-40GB"
    assert found("NVIDIA A100-SXM4-80GB") == "A100-80GB"
    assert found("NVIDIA GeForce RTX 4090", 24) == "RTX-4090-24GB"
    assert found("NVIDIA L4", 22) == "L4-24GB"
    assert found("NVIDIA L40S", 45) == "L40S-48GB"
    assert found("Radeon") is None


# Values that are not finite.


class Spoiled(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.inner, self.calls, self.at = tiny(), 0, at

    def forward(self, **inputs):
        self.calls += 1
        return self.inner(**inputs) * (math.nan if self.calls == self.at else 1.0)


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_stops_names_update_and_last_save(saves, tmp_path):
    args = tiny_arguments(
        tmp_path, save_steps=2, save_strategy="steps" if saves else "no", num_train_epochs=3
    )
    where = (
        f"The last save is {tmp_path}/checkpoint-2" if saves else "Nothing was saved in this run"
    )
    with pytest.raises(poise.Error, match=f"loss is -?nan at update 3; .*{where}"):
        poise.Trainer(Spoiled(at=5), args, train_dataset=Rows(8)).train()


def test_a_parameter_that_is_not_finite_is_named(tmp_path):
    model = tiny()
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] = math.inf
    with pytest.raises(poise.Error, match="parameter 'embedding.weight' itself has 1 of"):
        poise.Trainer(model, tiny_arguments(tmp_path), train_dataset=Rows(8)).train()


def test_skipped_updates_are_counted_in_line_bar_and_result(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    args = tiny_arguments(tmp_path, on_nonfinite="skip", report_to="none")
    output = poise.Trainer(Spoiled(at=5), args, train_dataset=Rows(8)).train()
    assert output.metrics["skipped_updates"] == 1
    lines = [line for line in lines_of(tmp_path) if "status" in line]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1]
    assert lines[2]["status"] == "nonfinite_loss"
