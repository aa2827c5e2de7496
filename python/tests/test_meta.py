"""Models made on the meta device: values, ties, what is refused, and bytes on two ranks."""

from __future__ import annotations

import poise
import pytest
import rank_processes
import torch
from plain_loop import Recipe, settings
from poise import meta
from tiny_models import Block, TinyForCausalLM, counted, ragged_windows, same_bits
from torch import nn


class Model(TinyForCausalLM):
    """With a tied head, a buffer of its own, a frozen and a transposed parameter."""

    def __init__(self, layers=3):
        super().__init__(layers=layers)
        self.head.weight = self.embedding.weight
        self.blocks[0].requires_grad_(False)
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.shift = nn.Parameter(torch.zeros(13, 1).t())

    def logits(self, input_ids):
        return super().logits(input_ids) * self.scale + self.shift


def fill(module):
    """Values that do not depend on the order of the calls."""
    generator = torch.Generator().manual_seed(3)
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.4)


def whole_model():
    model = Model()
    with torch.no_grad():
        for module in model.modules():
            fill(module)
    return model


def empty_model(layers=3):
    with torch.device("meta"):
        return Model(layers)


def trained(model, **options):
    engine = poise.Engine(model, settings(Recipe(), checkpointing={"policy": "every_n"}), **options)
    for window in ragged_windows(3):
        engine.step(window, lambda piece: (model(**piece), counted(piece)))
    return engine


def test_a_model_without_memory_is_given_back_with_its_values():
    model = empty_model()
    engine = poise.Engine(model, {"offload": {"parameters": "host"}}, materialize=fill)
    engine.give_back()
    for (name, got), want in zip(
        model.state_dict().items(), whole_model().state_dict().values(), strict=True
    ):
        assert got.device.type == "cpu" and torch.equal(got, want), name


def test_a_model_without_memory_trains_as_one_with():
    model, whole = empty_model(), whole_model()
    before = list(model.parameters())
    weight = model.embedding.weight
    trained(model, materialize=fill)
    trained(whole)
    assert same_bits(model, whole) and torch.equal(model.scale, whole.scale)
    assert model.head.weight is model.embedding.weight is weight
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert not model.blocks[0].up.weight.requires_grad and model.shift.stride() == (1, 1)


def test_modules_reset_themselves():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    engine = poise.Engine(model)
    assert (model[1].weight == 1).all() and (model[1].running_var == 1).all()
    assert 0 < model[0].weight.abs().max() <= 3**-0.5  # the bound of Linear's own rule
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    losses = [engine.step([x], lambda x: (model(x).square().mean(), 8)).loss for _ in range(5)]
    assert losses[-1] < losses[0]


def leaves_out(module):
    if not isinstance(module, nn.LayerNorm):
        fill(module)


def replaces(module):
    fill(module)
    if isinstance(module, nn.LayerNorm):
        module.weight = nn.Parameter(torch.ones(16))


def reaches_out(model):
    def fill_both(module):
        fill(module)
        model.head.bias.zero_()

    return fill_both


def test_what_materialize_must_not_do():
    for function, words in (
        (None, "Model has parameters or buffers on the meta device and no reset_parameters"),
        (leaves_out, "'blocks.0.norm.weight' has no values after materialize .* LayerNorm"),
        (replaces, "a new parameter in the place of 'blocks.0.norm.weight'"),
    ):
        with pytest.raises(poise.Error, match=words):
            poise.Engine(empty_model(), materialize=function)
    model = empty_model()
    with pytest.raises(RuntimeError, match="'head.bias' has no memory yet"):
        poise.Engine(model, materialize=reaches_out(model))
    with pytest.raises(poise.Error, match="the model's parameters have values"):
        poise.Engine(whole_model(), materialize=fill)


def test_a_trainer_takes_one(tmp_path):
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    with torch.device("meta"):
        model = Blocks()
    args = poise.TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, disable_tqdm=True)
    data = [{"x": torch.ones(16)}] * 16
    assert poise.Trainer(model, args, train_dataset=data).train().training_loss > 0


@pytest.mark.parametrize(
    ("backends", "kind"),
    [
        ("cpu:gloo,cuda:nccl", "cuda"),  # of init_process_group() without a name, with GPUs
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo", "cpu"),
    ],
)
def test_memory_comes_from_the_devices_that_the_ranks_speak_for(backends, kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(meta.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(meta.dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(meta.dist, "get_backend_config", lambda group: backends)
    assert meta.device_for(None) == torch.device("cuda:1" if kind == "cuda" else "cpu")


def test_alone_it_comes_from_the_gpu_where_there_is_one(monkeypatch):
    assert meta.device_for(None) == poise.ranks.device()
    monkeypatch.setattr(poise.ranks, "device", lambda: torch.device("cuda", 1))
    assert meta.device_for(None) == torch.device("cuda", 1)
    with torch.device("cuda:2"):  # torch.set_default_device's word
        assert meta.device_for(None) == torch.device("cuda", 2)


# Two ranks.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return rank_processes.run("meta_on_ranks.py", "all", tmp_path_factory.mktemp("meta"))


def test_two_ranks_train_the_values_of_the_first(ranks):
    for of_rank in ranks:
        assert of_rank["states"] == ranks[0]["states"]
        assert len(set(of_rank["states"].values())) == 1  # with and without memory, stages 2 and 3
        assert of_rank["calls"] == (0 if of_rank["rank"] else of_rank["modules"])


def test_no_rank_ever_holds_the_whole_model(ranks):
    for of_rank in ranks:
        bytes_of = of_rank["bytes"]
        # Of the largest unit: what rank 0 fills, what it is copied into, and marks of what is set.
        assert bytes_of["staging"] <= 2.3 * bytes_of["largest unit"]
        assert bytes_of["gathered"] <= 1.05 * bytes_of["largest unit"]
        assert bytes_of["parameters"] <= 1.05 * bytes_of["model"] / 2
        assert bytes_of["largest unit"] < bytes_of["model"] / 8


def test_a_failure_of_the_filling_rank_is_told(ranks):
    assert ranks[0]["failure"] == "ValueError: no such file"
    assert "ValueError: no such file" in ranks[1]["failure"]
