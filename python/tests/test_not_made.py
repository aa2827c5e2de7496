"""Where an engine cannot be made, its model is what it was: types, values, hooks and what is trained."""

from __future__ import annotations

import poise
import pytest
import torch
import torch.nn.functional as F
from balanced_runs import Net, samples
from poise import torch_optimizer
from test_meta import empty_model, fill, trained
from tiny_models import same_bits
from torch import nn
from wrapped_loops import adamw, network, plain, rows

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = {"dtype": "bf16", "parameters": "bf16"}
OFFLOADED = {"precision": BF16, "offload": {"parameters": "host", "optimizer": "host"}}


class Mixed(nn.Module):
    """Parameters of several types, tied, frozen, transposed, with hooks, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)  # bf16 does not hold it
        self.wide = nn.Parameter(torch.randn(6).double() / 3)
        self.narrow = nn.Parameter(torch.randn(6).half())
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.rnn = nn.GRU(6, 6)
        self.register_buffer("mean", torch.randn(6))
        self.calls = []
        self.blocks[1].register_forward_hook(lambda *_: self.calls.append("module"))
        self.blocks[1].weight.register_hook(lambda _: self.calls.append("parameter"))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.tied(x) * self.frozen + self.wide.float() + self.narrow.float() + self.mean
        return (self.rnn(x[None])[0] @ self.turned.t()).square().mean()


def expect_untouched(model):
    fresh = Mixed()
    for (name, got), want in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert (got.dtype, got.stride(), got.requires_grad) == (
            (want.dtype, want.stride(), want.requires_grad)
        ), name
        assert torch.equal(got, want), name
    assert model.tied.weight is model.blocks[0].weight
    assert torch.equal(model.mean, fresh.mean)
    assert not any("forward" in vars(m) or "flatten_parameters" in vars(m) for m in model.modules())
    model.state_dict()
    x = torch.ones(2, 6)
    for one in (model, fresh):
        one.calls.clear()
        one(x).backward()
    assert model.calls == fresh.calls == ["module", "parameter"]
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert p.grad is None if q.grad is None else torch.equal(p.grad, q.grad)
        p.grad = None


LATE = {
    "a unit of checkpointing": (
        {"checkpointing": {"policy": "list", "units": ["Conv2d"]}},
        "Conv2d",
    ),
    "a unit of activations": (
        {"offload": {"activations": "host", "activation_units": ["Conv2d"]}},
        "Conv2d",
    ),
    "a group": (
        {"optimizer": {"groups": [{"match": "Conv2d*"}]}},
        "'Conv2d\\*' matches no parameter",
    ),
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("base", [{}, {"precision": BF16}, OFFLOADED], ids=["fp32", "bf16", "host"])
def test_an_argument_that_is_refused_late(late, base):
    settings, message = LATE[late]
    offload = {**base.get("offload", {}), **settings.get("offload", {})}
    model = Mixed()
    with pytest.raises(poise.Error, match=message):
        poise.Engine(model, {**base, **settings, **({"offload": offload} if offload else {})})
    expect_untouched(model)


@pytest.mark.parametrize("base", [{}, {"precision": BF16}, OFFLOADED], ids=["fp32", "bf16", "host"])
def test_memory_that_runs_out(base):
    peak = poise.Engine(Mixed(), base).memory()["peak_bytes"]
    model = Mixed()
    for part in range(1, 20):
        with pytest.raises(torch.OutOfMemoryError):
            poise.Engine(model, {**base, "memory": {"budget_bytes": peak * part // 20}})
    expect_untouched(model)
    poise.Engine(model, base)


def test_a_model_without_memory_has_none_again():
    filled = []

    def fails(module):
        fill(module)
        filled.append(module)
        if len(filled) % 5 == 0:
            raise KeyError("no more in the file")

    model = empty_model()
    for _ in range(2):
        with pytest.raises(KeyError, match="no more in the file"):
            poise.Engine(model, materialize=fails)
        assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    with pytest.raises(poise.Error, match="Conv2d"):
        poise.Engine(model, LATE["a unit of checkpointing"][0], materialize=fill)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    trained(model, materialize=fill)
    unbroken = empty_model()
    trained(unbroken, materialize=fill)
    assert same_bits(model, unbroken)


def test_a_loop_that_cannot_be_wrapped_goes_on_in_torch(monkeypatch):
    windows = [(x[None], y[None]) for x, y in rows(4)]
    model, reference = network(), network()
    theirs, ours = adamw(reference), adamw(model)
    plain(reference, theirs, windows[:2])
    plain(model, ours, windows[:2])
    with monkeypatch.context() as patched, pytest.raises(poise.Error, match="at the very end"):
        patched.setattr(torch_optimizer.HandedOver, "give_settings", _fails)
        poise.wrap(model, ours, config={"precision": BF16})
    plain(reference, theirs, windows[2:])
    plain(model, ours, windows[2:])
    assert same_bits(model, reference)


def _fails(*_):
    raise poise.Error("[test] at the very end")


def seeded_net():
    torch.manual_seed(5)
    return Net()


def test_a_trainer_whose_optimizer_is_refused_late_leaves_its_model(tmp_path, monkeypatch):
    model = seeded_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    args = poise.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, offload_parameters="host"
    )
    trainer = poise.Trainer(model, args, train_dataset=samples(), optimizers=(sgd, None))
    with monkeypatch.context() as patched, pytest.raises(poise.Error, match="at the very end"):
        patched.setattr(torch_optimizer.HandedOver, "give_settings", _fails)
        trainer.train()
    assert trainer.engine is None and same_bits(model, seeded_net())
    assert trainer.train().global_step == 1


def test_it_is_taken_back_after_trials_too():
    model = network()
    engine = poise.Engine(model, OFFLOADED)
    x, y = rows(8)[:]
    engine.backward(F.cross_entropy(engine(x).float(), y))
    engine.discard_window()
    engine.unmake()
    assert same_bits(model, network()) and not engine.has_model
