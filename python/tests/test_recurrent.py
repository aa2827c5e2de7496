"""Recurrent layers, whose weights cuDNN would move into a buffer of its own."""

import copy

import poise
import pytest
import torch
from torch import nn


class Tagger(nn.Module):
    """Asks for the move in every forward, as most recurrent models do."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(5, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        self.rnn.flatten_parameters()
        return self.head(self.rnn(x)[0]).square().mean()


def flatten(rnn):
    """What flatten_parameters does on a GPU."""
    weights = list(rnn.parameters())
    buffer, begin = torch.empty(sum(weight.numel() for weight in weights)), 0
    with torch.no_grad():
        for weight in weights:
            values = weight.detach().clone()
            weight.set_(buffer.untyped_storage(), begin, weight.shape, weight.stride())
            weight.copy_(values)
            begin += weight.numel()


def losses(model, policies=()):
    engine = poise.Engine(model, {"batch": {"accumulation": 1}, "optimizer": {"lr": 0.01}})
    for policy in policies:  # as a search for a balance does
        engine.set_checkpointing({"policy": policy})
    return [engine.step([torch.ones(2, 3, 5)], lambda x: (model(x), 1)).loss for _ in range(3)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_weights_stay_where_the_engine_put_them(kind, monkeypatch):
    expected = losses(Tagger(kind))
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    model = Tagger(kind)
    flatten(model.rnn)  # before the engine is made it may move them
    assert losses(model) == expected
    assert losses(Tagger(kind), ["none"]) == expected


def test_they_may_move_again_when_the_engine_is_gone(monkeypatch):
    moved = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda rnn: moved.append(rnn))
    model = Tagger(nn.LSTM)
    engine = poise.Engine(model, {"batch": {"accumulation": 1}})
    moved.clear()
    model(torch.ones(2, 3, 5))
    assert not moved
    copied = copy.deepcopy(model)  # belongs to no engine
    moved.clear()
    copied(torch.ones(2, 3, 5))
    assert moved == [copied.rnn]
    engine.give_back()
    model(torch.ones(2, 3, 5))
    assert moved == [copied.rnn, model.rnn]
