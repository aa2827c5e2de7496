"""loss.backward() as torch has it, of a loss that a loop computed from a wrapped model's outputs."""

import gc
import logging

import poise
import pytest
import torch
import torch.nn.functional as F
from test_deepspeed import config, in_pieces
from tiny_models import same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint
from wrapped_loops import adamw, distance, network, plain, rows

pytestmark = pytest.mark.usefixtures("one_thread")


def wrap(model=None, accumulation=4, **more):
    model = model or network()
    return poise.wrap(model, adamw(model), accumulation=accumulation, **more)


@pytest.mark.parametrize(
    "settings", [{}, {"precision": {"dtype": "bf16"}}, {"precision": {"dtype": "fp16"}}]
)
def test_it_is_backward_of_the_model_to_the_bit(settings):
    models = []
    for says in (lambda model, loss: model.backward(loss), lambda model, loss: loss.backward()):
        model, optimizer, *_ = wrap(config=settings)
        for x, y in in_pieces(rows(32), 2):
            optimizer.zero_grad()
            says(model, F.cross_entropy(model(x), y))
            model.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        models.append(model.module)
        assert model.engine.updates == 4 and model.last_result.loss_scale > 0
    assert same_bits(*models)


def test_a_plain_loop_trains_as_big_batches_in_float64():
    reference = network(dtype=torch.float64)
    plain(reference, adamw(reference), in_pieces(rows(32), 8))
    model, optimizer, _, loader = wrap(loader=torch.utils.data.DataLoader(rows(32), 2))
    for x, y in loader:
        optimizer.zero_grad()
        features = {"logits": model(x), "of": [model.module]}
        torch.autograd.backward([F.cross_entropy(features["logits"] * 1.0, y)])
        optimizer.step()
    assert distance(model.module, reference) < 1e-6


def test_a_reentrant_checkpoint_around_the_model_is_named():
    model, optimizer, *_ = wrap(accumulation=1)
    x, y = rows(8)[:]
    hidden = nn.Linear(8, 8)(x)
    for around in (model, lambda given: F.cross_entropy(model(given), y)):
        outputs = checkpoint(around, hidden, use_reentrant=True)
        with pytest.raises(poise.Error, match="inside a reentrant checkpoint.*use_reentrant=False"):
            outputs.square().mean().backward(retain_graph=True)
        model.engine.discard_window()
        assert all(p.grad is None for p in model.parameters())
    reference = network()
    F.cross_entropy(reference(x), y).backward()
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
    model.engine.begin_update()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(model.engine.gradient(name), p.grad)


def test_one_of_a_model_beside_it_is_torchs_own():
    wrap()
    other = network(3)
    x, y = rows(8)[:]
    hidden = x.clone().requires_grad_()
    F.cross_entropy(checkpoint(other, hidden, use_reentrant=True), y).backward()
    reference = network(3)
    F.cross_entropy(reference(x), y).backward()
    for p, q in zip(other.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_what_is_computed_of_parameters_alone_may_be_added():
    def penalty(module):
        return 0.1 * sum((p**2).sum() for p in module.parameters())

    reference = network(dtype=torch.float64)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = rows(8)[:]
    (F.cross_entropy(reference(x.double()), y) + penalty(reference)).backward()
    sgd.step()
    model = network()
    model, optimizer, *_ = poise.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (F.cross_entropy(model(x), y) + penalty(model.module)).backward()
    optimizer.step()
    assert distance(model.module, reference) < 1e-6


class Reentrant(nn.Module):
    """Its recomputation calls torch.autograd.backward inside of the backward."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=True)


def test_a_backward_inside_of_a_backward_is_torchs():
    model, optimizer, *_ = wrap(Reentrant(), 1)
    x, y = rows(8)[:]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    reference = network(dtype=torch.float64)
    plain(reference, adamw(reference), [rows(8)[:]])
    assert distance(model.module.body, reference) < 1e-6


def test_other_graphs_stay_torchs_own():
    model, *_ = wrap()
    other = network(1)
    x, y = rows(8)[:]
    F.cross_entropy(other(x), y).backward()
    assert all(p.grad is not None for p in other.parameters())
    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))
    [gradient] = torch.autograd.grad(
        F.cross_entropy(model(x), y), [next(model.parameters())]
    )  # asks for numbers, and accumulates nothing
    assert gradient.abs().sum() > 0 and model.engine.micro_batches == 0


def test_a_model_that_was_given_back_is_torchs_again():
    engine, *_ = poise.initialize(model=network(), config=config())
    engine.destroy()
    x, y = rows(8)[:]
    F.cross_entropy(engine.module(x), y).backward()
    assert engine.module[0].weight.grad is not None


@pytest.mark.parametrize(
    "given",
    [{"gradient": torch.ones(())}, {"create_graph": True}, {"inputs": []}, {"retain_graph": True}],
)
def test_a_backward_of_another_kind_is_refused(given):
    model, *_ = wrap()
    x, y = rows(8)[:]
    with pytest.raises(poise.Error, match=r"backward\(\) with gradient, retain_graph"):
        F.cross_entropy(model(x), y).backward(**given)
    losses = [F.cross_entropy(model(x), y) for _ in range(2)]
    with pytest.raises(poise.Error, match="add the losses up"):
        torch.autograd.backward(losses)


def test_a_gradient_that_would_be_lost_is_an_error():
    model, *_ = wrap()
    x, y = rows(8)[:]
    message = r"reaches parameter '\d.\w+' of a wrapped model, but not through a call"
    with pytest.raises(poise.Error, match=message):
        F.cross_entropy(model.module(x), y).backward()
    with pytest.raises(poise.Error, match=message):
        (model.module[0].weight ** 2).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_of_two_models_names_neither():
    maker, judge = wrap(nn.Linear(3, 8)).model, wrap().model
    loss = F.cross_entropy(judge(maker(torch.ones(2, 3))), torch.tensor([0, 1]))
    with pytest.raises(poise.Error, match="comes from 2 wrapped models; say whose update"):
        loss.backward()
    maker.backward(loss)
    assert (maker.engine.micro_batches, judge.engine.micro_batches) == (1, 0)


def test_the_division_by_the_accumulation_is_noticed_once(caplog):
    model, optimizer, *_ = wrap()
    with caplog.at_level(logging.WARNING, "poise"):
        for x, y in in_pieces(rows(8), 2):
            (F.cross_entropy(model(x), y) / 4).backward()
            optimizer.step()
    assert caplog.text.count("the loss is divided by 4, as many micro-batches as a window has") == 1
    caplog.clear()
    other, *_ = wrap(accumulation=2)
    x, y = rows(2)[:]
    with caplog.at_level(logging.WARNING, "poise"):
        (F.cross_entropy(other(x), y) / 4).backward()
    assert caplog.text == ""


def test_torchs_own_is_there_again_when_no_loop_needs_another(monkeypatch):
    gc.collect()  # wrapped models of other tests
    before = torch.autograd.backward
    first, second = wrap(), wrap()
    assert torch.autograd.backward is not before
    del first
    gc.collect()
    assert torch.autograd.backward is not before
    del second
    gc.collect()
    assert torch.autograd.backward is before and before.__module__ == "torch.autograd"

    third, calls = wrap(), []
    inside = torch.autograd.backward

    def around(*given, **named):
        calls.append(given)
        return inside(*given, **named)

    monkeypatch.setattr(torch.autograd, "backward", around)
    del third
    gc.collect()
    assert torch.autograd.backward is around  # another library's stays
    torch.ones(2, requires_grad=True).sum().backward()
    assert len(calls) == 1
    monkeypatch.setattr(torch.autograd, "backward", before)
