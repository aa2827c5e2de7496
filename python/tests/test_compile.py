"""Compiled models and blocks train as uncompiled ones, with recomputation too."""

import copy
import logging
import os
import shutil

import poise
import pytest
import torch
from plain_loop import Recipe, settings
from poise import checkpointing, model_view, update, utilization
from tiny_models import TinyForCausalLM, counted, ragged_windows, same_bits, tiny

WINDOWS = ragged_windows(3)
POLICIES = ["none", "every_n", "selective"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that counts the graphs it is given and their runs."""

    def __init__(self, name):
        self.name, self.graphs, self.runs = name, 0, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        compiled = torch._dynamo.lookup_backend(self.name)(graph, inputs)

        def run(*args):
            self.runs += 1
            return compiled(*args)

        return run


def train(model, called=None, **sections):
    """Losses of three updates from one seed; `called`: what stands for the model in the loss."""
    called = model if called is None else called
    engine = poise.Engine(called, settings(Recipe(), **sections))
    torch.manual_seed(3)
    return [engine.step(w, lambda p: (called(**p), counted(p))).loss for w in WINDOWS]


def in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)


def wrapped(model, backend):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["torch.compile", "compile in place"])
def test_a_model_compiled_as_a_whole_trains_to_the_same_bits(backend, how):
    plain, model, counting = tiny(), tiny(), Counting(backend)
    if how == "torch.compile":
        compiled = torch.compile(model, backend=counting)
    else:
        model.compile(backend=counting)
        compiled = model
    engine = poise.Engine(compiled, settings(Recipe()))
    losses = [engine.step(w, lambda p: (compiled(**p), counted(p))).loss for w in WINDOWS]
    assert losses == train(plain)
    assert same_bits(plain, model)
    assert counting.graphs and counting.runs, "the model ran without its compiled graph"
    assert engine.units[0] == "blocks.0"
    assert torch.equal(engine.master("head.weight"), model.head.weight)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled", [in_place, wrapped])
def test_compiled_blocks_are_recomputed_as_compiled(compiled, backend, policy):
    dropout = 0.2
    plain, model, counting = tiny(dropout), tiny(dropout), Counting(backend)
    compiled(model, counting)
    losses = train(model, checkpointing={"policy": policy})
    assert losses == train(plain, checkpointing={"policy": "none"})
    blocks = [getattr(block, "_orig_mod", block) for block in model.blocks]
    assert all(same_bits(a, b) for a, b in zip(plain.blocks, blocks, strict=True))
    micro_batches = sum(len(window) for window in WINDOWS)
    # Each block runs once in forward; with recomputation once more in backward, where one micro-batch
    # counts nothing and has none.
    runs = 2 * micro_batches if policy == "none" else 2 * (2 * micro_batches - 1)
    assert counting.graphs and counting.runs == runs


@pytest.mark.parametrize("policy", ["every_n", "selective"])
@pytest.mark.parametrize("whole", [False, True])
def test_blocks_that_run_uncompiled_since_compiling_came_later_are_told(whole, policy, caplog):
    plain, model, counting = tiny(), tiny(), Counting("aot_eager")
    engine = poise.Engine(model, settings(Recipe(), checkpointing={"policy": policy}))
    called = model
    if whole:
        called = torch.compile(model, backend=counting)
    else:
        in_place(model, counting)
    with caplog.at_level(logging.WARNING, logger="poise"):
        losses = [engine.step(w, lambda p: (called(**p), counted(p))).loss for w in WINDOWS]
    assert losses == train(plain)
    assert (counting.graphs > 0) == whole  # what is around the blocks
    told = [r.getMessage() for r in caplog.records if "run uncompiled" in r.getMessage()]
    assert len(told) == 1 and "(Block)" in told[0]


def forwards(model, backend):
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)


@pytest.mark.parametrize("compiled", [in_place, wrapped, forwards])
def test_what_is_watched_in_a_first_update_does_not_end_the_compiling(compiled):
    model, counting = tiny(), Counting("eager")
    compiled(model, counting)
    assert model_view.has_compiled_parts(model) and not model_view.has_compiled_parts(tiny())
    engine = poise.Engine(model, settings(Recipe()))
    use = utilization.Utilization(model, peak_flops=1e12)
    for number, window in enumerate(WINDOWS):
        loss_fn = use.around(lambda p: poise.loss.as_loss((model(**p), counted(p))))
        update.step(engine, window, loss_fn, number == 0, lambda line: None)
        use.window(window)
    assert counting.runs == 2 * sum(map(len, WINDOWS))
    assert counting.graphs == 1  # of two blocks alike, and not again after the first update
    each = 2 * sum(p.numel() for p in model.parameters())
    assert use.take(1.0) * 1e12 == pytest.approx(
        3 * each * sum(utilization.positions(batch) for window in WINDOWS for batch in window)
    )


def test_a_compiled_forward_is_seen_below_what_poise_puts_over_it():
    model = tiny()
    forwards(model, "eager")
    engine = poise.Engine(model, settings(Recipe(), checkpointing={"policy": "every_n"}))
    assert hasattr(model.blocks[0].forward, "own") and model_view.has_compiled_parts(engine.model)


def test_removing_recomputation_leaves_blocks_compiled():
    model, counting = tiny(), Counting("eager")
    in_place(model, counting)
    calls = [block._compiled_call_impl for block in model.blocks]
    handle = checkpointing.apply(model)
    assert all(b._compiled_call_impl is not c for b, c in zip(model.blocks, calls, strict=True))
    with pytest.raises(poise.Error, match="recomputed already"):
        checkpointing.apply(model)
    handle.remove()
    assert all(b._compiled_call_impl is c for b, c in zip(model.blocks, calls, strict=True))
    assert not any("forward" in vars(block) for block in model.blocks)
    copied = copy.deepcopy(model)
    assert same_bits(copied, model)


def test_checkpointing_of_a_model_compiled_as_a_whole_is_refused():
    compiled = torch.compile(TinyForCausalLM(), backend="eager")
    with pytest.raises(poise.Error, match="compile the blocks"):
        poise.Engine(compiled, settings(Recipe(), checkpointing={"policy": "every_n"}))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
def test_inductor_trains_to_rounding(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = tiny()
    in_place(model, "inductor")
    losses = train(model, checkpointing={"policy": "every_n"})
    assert losses == pytest.approx(train(tiny()), rel=1e-5)
