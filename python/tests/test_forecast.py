"""What a run will hold, said before its engine is made, and held to what it then held."""

from __future__ import annotations

import json
from collections import UserDict

import poise
import pytest
import torch
from balanced_runs import FUNCTION, LENGTH, Net, samples, train
from poise import cli, report, train_command, trainer_engine
from tiny_models import same_bits
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

pytestmark = pytest.mark.usefixtures("one_thread")


class Opaque:
    """A batch that nobody looks into."""

    def __init__(self, inside):
        self.inside = inside


class OfOpaque(poise.Trainer):
    def compute_loss(self, model, inputs, **more):
        return model(**getattr(inputs, "inside", inputs))


def plan_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line["plan"] for line in lines if "plan" in line), lines


class Largest(TorchDispatchMode):
    """Bytes of the operator with the largest tensors, given and made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor)]
        self.most = max(self.most, sum(t.nbytes for t in tensors))
        return made


def largest_operator(count):
    batch = default_collate(samples(count))
    with Largest() as found:
        Net()(**batch)[0].backward()
    return found.most


@pytest.mark.parametrize("given", [{}, {"checkpointing": "every_n"}, {"bf16": True}])
def test_it_is_said_before_anything_is_allocated_and_right(tmp_path, monkeypatch, capsys, given):
    ledger, seen = poise.memory.Ledger(), {}
    real, engine = trainer_engine.told, trainer_engine.Engine

    def told(forecast, place, note):
        before = ledger.snapshot().current_bytes
        ledger.reset_peak()
        real(forecast, place, note)
        seen["bytes"] = ledger.snapshot().peak_bytes - before
        seen["said"] = capsys.readouterr().err

    def made(*arguments, **keywords):
        assert "said" in seen
        return engine(*arguments, **keywords)

    monkeypatch.setattr(trainer_engine, "told", told)
    monkeypatch.setattr(trainer_engine, "Engine", made)
    model = Net()
    with ledger:
        trainer, _ = train(tmp_path, model=model, memory_budget="64MiB", **given)
    generator, sample = torch.get_rng_state().numel(), 2 * LENGTH * 8
    # What was looked at, and put back; of the model no more than one operator at a time, on zeros.
    operator = largest_operator(trainer.args.global_batch_size)
    assert 0 < seen["bytes"] <= 2 * generator + 4 * sample + operator
    assert "plan, before anything is allocated: micro-batch " in seen["said"]
    assert "would hold" in seen["said"]
    plan, lines = plan_of(tmp_path)
    foretold, measured = (sum(plan[key].values()) for key in ("foretold", "measured"))
    assert foretold == pytest.approx(measured, rel=0.02)
    assert "before anything" in report.page(lines, "run")


def test_a_model_that_cannot_be_traced_is_measured_and_that_is_said(tmp_path, capsys):
    without_memory = []

    class Looks(Net):
        def forward(self, ids, labels):
            loss, count = super().forward(ids, labels)
            if isinstance(loss, FakeTensor):
                without_memory.append(loss.shape)
            return loss * float(ids.float().mean() * 0 + 1), count

    train(tmp_path, model=Looks(), memory_budget="64MiB")
    assert len(without_memory) == 1  # not once more with an engine around its blocks
    said = capsys.readouterr().err
    assert "nothing can be said before anything is allocated" in said
    assert "does not run without data" in said and "are measured instead" in said
    plan, _ = plan_of(tmp_path)
    assert "foretold" not in plan


@pytest.mark.parametrize("kind", [UserDict, Opaque])
def test_collators_may_make_batches_of_kinds_of_their_own(tmp_path, capsys, kind):
    """As those of transformers, whose tensors are looked for; where none are found, that is said."""
    models, given = [], {"memory_budget": "64MiB", "separable_loss": True}
    for collate in (lambda rows: kind(default_collate(rows)), default_collate):
        torch.manual_seed(0)
        models.append(Net())
        how = {"data_collator": collate, "kind": OfOpaque}
        trainer, _ = train(tmp_path, models[-1], how, **given)
        given = {"per_device_train_batch_size": trainer.args.per_device_train_batch_size}
        if collate is not default_collate:
            said = capsys.readouterr().err
            assert ("would hold" in said) == (kind is UserDict)
            assert ("holds no tensor with samples" in said) == (kind is Opaque)
    assert same_bits(*models)


def test_a_run_draws_the_same_numbers_with_and_without(tmp_path):
    def run(folder, **given):
        torch.manual_seed(3)
        return train(tmp_path / folder, model=Net(dropout=0.5), max_steps=2, **given)

    found, planned = run("found", memory_budget="64MiB")
    size = found.args.per_device_train_batch_size
    checkpointing = found.args.checkpointing
    _, given = run("given", per_device_train_batch_size=size, checkpointing=checkpointing)
    assert planned == given


def test_poise_train_of_a_model_of_python_says_it_first_too(tmp_path, monkeypatch, capfd):
    (tmp_path / "foretold_net.py").write_text(FUNCTION)
    path = tmp_path / "run.json"
    document = {
        "model": {"import": "foretold_net:build"},
        "batch": {"global_batch_size": 8},
        "memory": {"budget_bytes": "64MiB"},
        "train": {"output_dir": str(tmp_path / "out"), "max_updates": 2},
    }
    path.write_text(json.dumps(document))
    engine, seen = train_command.Engine, []

    def made(*arguments, **keywords):
        seen.append(capfd.readouterr().out)
        return engine(*arguments, **keywords)

    monkeypatch.setattr(train_command, "Engine", made)
    assert cli.main(["train", str(path)]) == 0
    assert "plan, before anything is allocated: micro-batch " in seen[0]
    plan, _ = plan_of(tmp_path / "out")
    assert sum(plan["foretold"].values()) == pytest.approx(sum(plan["measured"].values()), rel=0.02)
