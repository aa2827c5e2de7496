"""What a model and a Trainer keep of runs of their own code is not what a trace without memory left there."""

from __future__ import annotations

import math

import poise
import pytest
import torch
from balanced_runs import LENGTH, Net, batch_of, train, with_and_without_a_plan
from poise import fake_trace, kept_attributes
from tiny_models import same_bits
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Keeps(Net):
    """Makes a mask and tables once, in an attribute and in containers."""

    def __init__(self):
        super().__init__()
        self.scale, self.tables, self.made = None, {}, []
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, ids, labels):
        if self.scale is None:
            self.scale = torch.full((LENGTH, 1), 0.5)
            self.made.append(self.scale)
        if LENGTH not in self.tables:
            self.tables[LENGTH] = [torch.arange(LENGTH).unsqueeze(1) / LENGTH]
        hidden = self.embedding(ids) * self.scale + self.tables[LENGTH][0]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten()), labels.numel()


def test_a_plan_leaves_a_model_that_runs():
    model = Keeps()
    answer = poise.plan(
        model, batch_of(2), global_batch_size=8, loss_fn=lambda batch: model(**batch)
    )
    assert answer.traced_by == "fake tensors"
    assert model.scale is None and model.tables == {} and model.made == []
    assert model.training and not model.drop.training  # the mode of each module
    assert math.isfinite(model(**batch_of(2))[0].item())
    made = model.scale
    poise.plan(model, batch_of(2), global_batch_size=8, loss_fn=lambda batch: model(**batch))
    assert model.scale is made and model.made == [made] and len(model.tables[LENGTH]) == 1


def test_so_does_a_trace_that_fails():
    model = Keeps()
    model.register_forward_hook(lambda module, given, returned: float(returned[0]))
    with pytest.raises(fake_trace.Untraceable):
        fake_trace.trace(model, lambda b: model(**b)[0], batch_of(1), blocks=[], recomputed=False)
    assert model.scale is None and not model.drop.training


def test_a_trainer_that_plans_trains_what_the_forward_keeps_as_one_that_does_not(tmp_path):
    found, given = with_and_without_a_plan(tmp_path, Keeps)
    assert same_bits(found, given)


def test_a_compute_loss_that_keeps_figures_keeps_none_of_a_trace(tmp_path):
    class Figures(poise.Trainer):
        def __init__(self, *given, **named):
            self.figures, self.last = {"train": []}, None
            super().__init__(*given, **named)

        def compute_loss(self, model, inputs, **more):
            loss = model(**inputs)[0]
            self.last = loss.detach()
            self.figures["train"].append(self.last * 1)
            return loss

    trainer, _ = train(
        tmp_path, trainer={"kind": Figures}, memory_budget="1GiB", separable_loss=True
    )
    assert all(math.isfinite(float(one)) for one in [*trainer.figures["train"], trainer.last])


def test_containers_of_all_kinds_get_back_what_they_held():
    class Holder:
        def __init__(self):
            self.inner = {"a": [1]}
            self.all = {"set": {1}, "list": [self.inner], "same": self.inner}

    holder = Holder()
    inner, all_ = holder.inner, holder.all
    with pytest.raises(KeyError), kept_attributes.kept(holder):
        holder.new = 1
        holder.inner["a"].append(2)
        holder.all["set"].add(2)
        holder.all["list"].clear()
        holder.all = None
        raise KeyError
    assert holder.inner is inner == {"a": [1]} and holder.all is all_
    assert all_ == {"set": {1}, "list": [inner], "same": inner} and not hasattr(holder, "new")


@pytest.mark.parametrize("what", ["model", "blocks", "forwards"])
def test_compiled_code_runs_compiled_after_a_plan(what, tmp_path):
    """It would not after it met a mode of torch's, without a word."""
    calls = []

    def backend(graph, examples):
        return lambda *given: calls.append(1) or graph.forward(*given)

    def updates_calls(**given):
        torch._dynamo.reset()
        model = Net()
        if what == "model":
            model = torch.compile(model, backend=backend)
        for block in model.blocks if what != "model" else ():
            if what == "blocks":
                block.compile(backend=backend)
            else:
                block.forward = torch.compile(block.forward, backend=backend)

        class Begins(poise.TrainerCallback):
            def on_step_begin(self, args, state, control, **details):
                calls.clear()

        trainer, _ = train(tmp_path / str(len(given)), model, {"callbacks": [Begins()]}, **given)
        return len(calls), trainer.args.per_device_train_batch_size

    found, size = updates_calls(memory_budget="1GiB", separable_loss=True)
    assert found > 0 and (found, size) == updates_calls(per_device_train_batch_size=size)
