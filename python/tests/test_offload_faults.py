"""A disk that fails for a while under what is offloaded: the window that it met is lost, or the run says from
where it goes on; never are numbers wrong."""

from __future__ import annotations

import contextlib
import resource

import poise
import pytest
import torch
import torch.nn.functional as F
from tiny_models import same_bits
from wrapped_loops import network, rows

pytestmark = pytest.mark.usefixtures("one_thread")

UPDATES = 4
X, Y = rows(32)[:]


@contextlib.contextmanager
def full_disk():
    """No file of this process can be written to."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def engine_of(model, folder, io, what):
    # Blocks of 4 KiB: no tensor here fills one.
    offload = {what: "file", "directory": str(folder), "block_bytes": 4096, "io": io}
    return poise.Engine(model, {"offload": {**offload, "activation_min_bytes": 0}})


def update(engine, number):
    window = [(X[i : i + 4], Y[i : i + 4]) for i in range(8 * number, 8 * number + 8, 4)]
    return engine.step(window, lambda batch: F.cross_entropy(engine.model(batch[0]), batch[1]))


@pytest.mark.parametrize("io", ["threads", "auto"])
@pytest.mark.parametrize("what", ["gradients", "activations"])
def test_a_window_that_met_a_full_disk_runs_again(tmp_path, what, io):
    whole, model = network(), network()
    unbroken = poise.Engine(whole)
    engine = engine_of(model, tmp_path, io, what)
    for number in range(UPDATES):
        update(unbroken, number)
        if number % 2 == 1:
            for _ in range(3):
                with (
                    full_disk(),
                    pytest.raises(poise.Error, match="cannot (write|take) .* File too large"),
                ):
                    update(engine, number)
                assert engine.updates == number and engine.micro_batches == 0
        update(engine, number)
    assert same_bits(model, whole)


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_an_update_that_met_one_goes_on_from_a_save(tmp_path, what):
    whole, model, again = network(), network(), network()
    unbroken = poise.Engine(whole)
    for number in range(UPDATES):
        update(unbroken, number)
    engine = engine_of(model, tmp_path / "disk", "auto", what)
    update(engine, 0)
    engine.save(tmp_path / "saves")
    with full_disk(), pytest.raises(poise.Error, match="cannot (write|take) .* File too large"):
        update(engine, 1)
    for call in (
        lambda: update(engine, 1),
        lambda: engine.master("0.weight"),
        lambda: engine.save(tmp_path / "saves"),
        lambda: engine.gathered().__enter__(),
    ):
        with pytest.raises(poise.Error, match="ended in its middle.*a new engine, from .* a saved"):
            call()
    resumed = engine_of(again, tmp_path / "disk", "auto", what)
    resumed.load(tmp_path / "saves")
    for number in range(1, UPDATES):
        update(resumed, number)
    values = resumed.state_dict()
    assert all(torch.equal(values[name], p) for name, p in whole.named_parameters())
