"""A rank of a world of 1,024 that is not there: bytes and calls of a real model's update."""

from __future__ import annotations

import time

import poise
import pytest
import torch
from poise.models.byte_gpt import ByteGPT

RANKS, ALIGNMENT, K = 1024, 256, 2
BLOCKS = 6


def padded_units(model):
    """Elements of each block, and of what is in none, as all ranks together hold them."""
    units = {}
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "rest"
        whole = -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        units[unit] = units.get(unit, 0) + whole
    share = RANKS * ALIGNMENT
    return [-(-numel // share) * share for numel in units.values()]


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_sends_and_holds_what_theory_says(stage, half):
    begun = time.monotonic()
    model = ByteGPT(layers=BLOCKS, width=192, heads=6, sequence_length=64)
    units = padded_units(model)
    whole = sum(units)
    precision = {"dtype": "bf16", "parameters": "bf16"} if half else {}
    group = poise.comm.fake(RANKS - 1, RANKS)
    engine = poise.Engine(model, {"zero": {"stage": stage}, "precision": precision}, group=group)
    rows = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(1))
    window = [(rows[:, :-1], rows[:, 1:])] * K
    group.reset_traffic()
    result = engine.step(window, lambda b: (model.loss(*b), b[1].numel()))
    assert str(result.status) == "applied"

    e_p, e_g = (2 if half else 4), 4
    held = engine.memory()["current"]
    split = [RANKS if stage >= least else 1 for least in (1, 2, 3)]
    assert held["optimizer"] == (12 if half else 8) * whole // split[0]
    assert held["gradients"] == e_g * whole // split[1]
    # Around the rank's span, which other ranks' gathers do not reach, nothing else is kept.
    assert held["parameters"] == e_p * whole // split[2]
    assert held["gathered"] == 0

    calls = {kind: numbers["calls"] for kind, numbers in group.traffic().items()}
    sent = {kind: numbers["bytes"] for kind, numbers in group.traffic().items()}
    reduces = K if stage >= 2 else 1
    assert calls["reduce_scatter"] == len(units) * reduces
    assert sent["reduce_scatter"] == reduces * e_g * whole // RANKS * (RANKS - 1)
    # Blocks before and after, in every micro-batch; what is in no block once.
    rest = units[0]
    gathered = [e_g * whole, e_p * whole, e_p * whole, K * e_p * (2 * whole - rest)][stage]
    gathers = [len(units), len(units), len(units), K * (2 * BLOCKS + 1)][stage]
    small = (
        calls["all_gather"] - gathers
    )  # sums of the window; stage 2 on: numbers of micro-batches
    assert small == (2 if stage >= 2 else 1)
    few = sent["all_gather"] - gathered // RANKS * (RANKS - 1)
    assert 0 < few <= small * 16 * 8 * (RANKS - 1)
    assert calls["all_reduce"] == calls["all_to_all"] == calls["broadcast"] == 0
    assert time.monotonic() - begun < 60
