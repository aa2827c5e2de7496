"""Trainings that the scripts of several ranks have in common; torch.distributed is initialized."""

from __future__ import annotations

import dataclasses
import hashlib

import poise
import torch
import torch.distributed as dist
from plain_loop import Recipe, settings
from tiny_models import batch, counted, split

UPDATES = 5
STAGES = (0, 1, 2, 3)
FP32 = dataclasses.replace(Recipe(), eps=1e-3)


def windows_of(counts, updates=UPDATES):
    """Of every update the micro-batches of each rank, as many as `counts` says."""
    windows = []
    for update in range(updates):
        pieces = split(batch(2 * sum(counts), 12, seed=100 + update, masked=0.4), 2)
        windows.append([[pieces.pop(0) for _ in range(count)] for count in counts])
    return windows


def digest(tensors):
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        whole.update(name.encode() + data.tobytes())
    return whole.hexdigest()


def masters_of(engine):
    trained = [name for name, p in engine.model.named_parameters() if p.requires_grad]
    return {name: engine.master(name).detach().clone() for name in trained}


def trained(model, windows, config, between=None):
    """Trains `model`; what every rank must have alike, and the masters.

    between: gets (engine, number of the update) after each.
    """
    engine = poise.Engine(model, config)
    losses = []
    for number, window in enumerate(windows):
        mine = window[dist.get_rank()]
        result = engine.step(mine, lambda piece: (model(**piece), counted(piece)))
        losses.append([result.loss, result.grad_norm, result.tokens, str(result.status)])
        if between is not None:
            between(engine, number)
    masters = masters_of(engine)
    seen = {
        "losses": losses,
        "masters": digest(masters),
        "state": digest(engine.state_dict()),
    }
    return seen, masters


def config_of(recipe, stage, accumulation=1, **zero):
    return settings(recipe, accumulation, zero={"stage": stage, **zero})
