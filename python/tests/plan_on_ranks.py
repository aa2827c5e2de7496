"""One rank of test_plan_ranks.py: `plan_on_ranks.py CASE FOLDER`, started by rank_processes."""

from __future__ import annotations

import poise
import rank_processes
import torch
import torch.distributed as dist
from poise.models.byte_gpt import ByteGPT
from tiny_models import TinyForCausalLM, batch

MICRO_BATCH, WINDOW = 4, 2


def small():
    """Blocks that share a collective."""
    model = TinyForCausalLM(layers=20)
    return model, batch(MICRO_BATCH, 12, seed=1), lambda piece: model(**piece)


def large():
    """Blocks that travel alone."""
    model = ByteGPT(layers=3, width=128, heads=4, sequence_length=32)
    rows = torch.randint(256, (MICRO_BATCH, 33), generator=torch.Generator().manual_seed(1))
    return model, rows, lambda piece: model.loss(piece[:, :-1], piece[:, 1:])


def frozen():
    """What is trained is far smaller than a block."""
    model, rows, loss = large()
    for block in model.blocks:
        block.requires_grad_(False)
    return model, rows, loss


MODELS = {"small": small, "large": large, "frozen": frozen}
# Model, precision, stage, ranks of a group that shards (0: all).
STAGES = [
    *(("small", precision, stage, 0) for precision in ("fp32", "bf16") for stage in range(4)),
    *(("large", "fp32", stage, 0) for stage in range(4)),
]
GROUPS = [(model, "fp32", stage, 2) for model in MODELS for stage in (1, 2, 3)]


def held(model, precision, stage, shard_ranks):
    """By account: between updates, at the peak of an update, the highest of each."""
    torch.manual_seed(0)
    module, piece, loss = MODELS[model]()
    # A group of its own: what one has reserved stays on the books of its first engine.
    group = dist.new_group()
    if shard_ranks:
        group = poise.comm.hybrid(shard_ranks, group=group)
    settings = {
        "precision": {"dtype": precision, "parameters": precision},
        "batch": {"accumulation": WINDOW},
        "zero": {"stage": stage, "shard_group_size": shard_ranks},
    }
    engine = poise.Engine(module, settings, group=group)
    built = engine.memory()["current"]
    for _ in range(2):
        engine.step([piece] * WINDOW, lambda batch: (loss(batch), 1))
    books = engine.memory()
    return built, books["at_peak"], books["own_peak"]


if __name__ == "__main__":
    rank_processes.main(
        {
            "stages": lambda folder: [held(*case) for case in STAGES],
            "groups": lambda folder: [held(*case) for case in GROUPS],
        }
    )
