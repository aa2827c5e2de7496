"""One rank of test_meta.py: `meta_on_ranks.py all FOLDER`, started by rank_processes."""

from __future__ import annotations

import sys

import poise
import rank_processes
import torch
import torch.distributed as dist
from plain_loop import Recipe
from test_meta import empty_model, fill, whole_model
from tiny_models import counted
from torch import nn
from training_on_ranks import config_of, digest, windows_of


def trained(model, stage, **options):
    engine = poise.Engine(model, config_of(Recipe(), stage, 2), **options)
    for window in windows_of([2, 2], updates=3):
        mine = window[dist.get_rank()]
        engine.step(mine, lambda piece: (model(**piece), counted(piece)))
    return digest(engine.state_dict())


def states():
    """Of a model with memory and of those without; the function is called on rank 0 alone."""
    calls = []

    def counting(module):
        calls.append(module)
        fill(module)

    made = {"whole 2": trained(whole_model(), 2)}
    for stage in (2, 3):
        made[f"empty {stage}"] = trained(empty_model(), stage, materialize=counting)
    return made, len(calls)


def held():
    """Peaks of the accounts while an engine of stage 3 is made of a model of many equal units."""
    layers, width = 24, 96
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    engine = poise.Engine(model, config_of(Recipe(), 3))
    peaks = engine.memory()["own_peak"]
    unit = 4 * (width * width + 256)  # the bias is padded
    return {**peaks, "largest unit": unit, "model": layers * unit}


def failure():
    def fails(module):
        raise ValueError("no such file")

    try:
        poise.Engine(empty_model(), config_of(Recipe(), 3), materialize=fails)
    except (ValueError, poise.Error) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(name, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made, calls = states()
    modules = sum(1 for m in empty_model().modules() if any(True for _ in m.parameters(False)))
    value = {
        "rank": dist.get_rank(),
        "states": made,
        "calls": calls,
        "modules": 2 * modules,
        "bytes": held(),
        "failure": failure(),  # ends the group
    }
    rank_processes.report(name, folder, dist.get_rank(), value)


if __name__ == "__main__":
    main(*sys.argv[1:])
