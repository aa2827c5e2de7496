"""A run that stops over a non-finite loss says where the first bad number is."""

import re

import poise
import pytest
import torch
from poise.nonfinite import cause
from poise.update import step
from tiny_models import batch, tiny
from torch import nn

NAN = float("nan")


class Net(nn.Module):
    """A classifier of which one place can be spoiled."""

    def __init__(self, spoiled=None):
        super().__init__()
        torch.manual_seed(0)
        self.spoiled = spoiled
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.calls = 0

    def forward(self, x, labels):
        self.calls += 1
        hidden = self.dropout(self.norm(self.first(x)))
        hidden = self.blocks[0](hidden)
        if self.spoiled == "between" and self.calls % 2 == 0:  # every second micro-batch
            hidden = hidden / 0
        hidden = self.blocks[1](hidden)
        loss = nn.functional.cross_entropy(hidden, labels)
        if self.spoiled == "once" and self.calls == 1:
            return loss * NAN
        return loss * NAN if self.spoiled == "loss" else loss


def window(size=2):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(4, 3, generator=generator),
            "labels": torch.arange(4),
        }
        for _ in range(size)
    ]


def message(model, batches):
    """Of the Error that stops the first update."""
    engine = poise.Engine(model, {"engine": {"on_nonfinite": "stop"}})
    with pytest.raises(poise.Error) as caught:
        step(engine, batches, lambda b: poise.Loss(model(**b), 4), first=True, note=print)
    return str(caught.value)


def test_a_parameter_is_named():
    model = Net()
    with torch.no_grad():
        model.blocks[1].weight[0, 1] = NAN
    text = message(model, window())
    assert re.match(r"\[engine\] the loss is nan at update 1; nothing was changed\.", text)
    assert text.endswith(
        "The parameter 'blocks.1.weight' itself has 1 of 16 values that are not finite. Nothing was "
        "saved in this run"
    )


def test_a_buffer_is_named():
    model = Net().eval()
    model.norm.running_var[2] = NAN
    assert "The buffer 'norm.running_var' itself has 1 of 4" in message(model, window())


def test_an_input_is_named():
    batches = window()
    batches[1]["x"][2, 0] = float("inf")
    assert "Micro-batch 2 of 2 has 1 of 12 values that are not finite in its input x" in message(
        Net(), batches
    )


def test_the_first_module_is_named():
    # Its output is the first one that is bad: the division before it belongs to no module.
    text = message(Net("between"), window())
    assert (
        "first output that is not finite is that of 'blocks.1' (Linear), in micro-batch 2 of 2"
        in text
    )


def test_a_loss_of_finite_outputs_is_told_apart():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, **inputs):
            return self.net(**inputs)

    wrapped = Wrapped()
    engine = poise.Engine(wrapped, {"engine": {"on_nonfinite": "stop"}})
    with pytest.raises(
        poise.Error, match="NaN or inf in micro-batch 1 of 2, only its loss is not finite"
    ):
        step(engine, window(), lambda b: poise.Loss(wrapped(**b) * NAN, 4), False, print)
    assert "that of the model (Net), in micro-batch 1 of 2" in message(Net("loss"), window())


def test_a_loss_that_does_not_come_again():
    assert "so was a second forward of the same window" in message(Net("once"), window())


def test_looking_changes_nothing():
    model = Net("between")
    engine = poise.Engine(model, {})
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    assert "blocks.1" in cause(engine, window(), lambda b: poise.Loss(model(**b), 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert not any(m._forward_hooks for m in model.modules())


def test_masks_of_negative_infinity_are_no_finding():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.layer = nn.Identity(), nn.Linear(2, 2)

        def forward(self, x):
            scores = self.mask(torch.tensor([[0.0, float("-inf")], [0.0, 0.0]])).softmax(-1)
            return (self.layer(scores @ x).abs() / 0).sum()

    text = message_of_loss(Masked())
    assert "that of the model (Masked), in micro-batch 1 of 1" in text


def message_of_loss(model):
    engine = poise.Engine(model, {"engine": {"on_nonfinite": "stop"}})
    with pytest.raises(poise.Error) as caught:
        step(engine, [torch.ones(2, 2)], lambda x: poise.Loss(model(x), 2), False, print)
    return str(caught.value)


def test_other_errors_are_left_alone():
    model = tiny()
    engine = poise.Engine(model, {})
    with pytest.raises(poise.Error) as caught:
        step(engine, [batch(2, 4, seed=1)], lambda piece: 3.0, first=False, note=print)
    assert "not finite" not in str(caught.value)


def test_the_trainer_names_it(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.blocks[0].up.weight[3, 2] = float("inf")
    rows = [{name: t[0] for name, t in batch(1, 8, seed=i).items()} for i in range(4)]
    args = poise.TrainingArguments(str(tmp_path), disable_tqdm=True, use_cpu=True)
    with pytest.raises(poise.Error, match=r"The parameter 'blocks\.0\.up\.weight' itself"):
        poise.Trainer(model, args, train_dataset=rows).train()
