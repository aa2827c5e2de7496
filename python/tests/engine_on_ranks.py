"""One rank of test_ranks.py: `engine_on_ranks.py CASE FOLDER`, started by rank_processes.

Rank 0 also writes what trained to CASE.pt, for the comparison with float64.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc

import poise
import rank_processes
import torch
import torch.distributed as dist
from plain_loop import Recipe
from tiny_models import WIDTH, Block, TinyForCausalLM, batch, tiny
from torch import nn
from training_on_ranks import (
    FP32,
    STAGES,
    config_of,
    trained,
    windows_of,
)

PRECISIONS = {
    "fp32": Recipe(),
    "bf16 autocast": Recipe(autocast=torch.bfloat16),
    "fp16 autocast": Recipe(autocast=torch.float16, loss_scale=1024.0),
    "bf16 parameters": Recipe(parameters=torch.bfloat16, autocast=torch.bfloat16),
}
# With a tiny eps a gradient next to 0 moves its parameter by the whole learning rate, up or down as
# rounding has it: the error of any implementation is then a matter of chance.
OPTIMIZERS = {"adamw": {"eps": 1e-3}, "sgd": {"optimizer": "sgd", "weight_decay": 0.0, "lr": 0.1}}
ACCUMULATIONS = (1, 3)


def recipe_of(precision, optimizer):
    return dataclasses.replace(PRECISIONS[precision], **OPTIMIZERS[optimizer])


class Tied(TinyForCausalLM):
    """The head is the embedding, the first block is frozen, the last is called twice."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight
        self.blocks[0].requires_grad_(False)

    def logits(self, input_ids):
        hidden = self.embedding(input_ids)
        for block in [*self.blocks, self.blocks[-1]]:
            hidden = block(hidden)
        return self.head(hidden)


def tied():
    torch.manual_seed(5)
    return Tied()


def grid(folder):
    seen, masters = {}, {}
    for precision in PRECISIONS:
        for optimizer in OPTIMIZERS:
            recipe = recipe_of(precision, optimizer)
            for k in ACCUMULATIONS:
                windows = windows_of([k, k])
                for stage in STAGES:
                    name = f"{precision}, {optimizer}, {k}, {stage}"
                    config = config_of(recipe, stage, k)
                    seen[name], masters[name] = trained(tiny(), windows, config)
    return seen, masters


def uneven(folder):
    seen, masters = {}, {}
    for counts in ([3, 2], [3, 0], [0, 2]):
        for stage in STAGES:
            name = f"{counts}, {stage}"
            made = trained(tiny(), windows_of(counts), config_of(FP32, stage))
            seen[name], masters[name] = made
    return seen, masters


def shapes(folder):
    """Tied, frozen and called twice; with recompute too."""
    seen, masters = {}, {}
    for policy in ("none", "every_n"):
        for stage in STAGES:
            config = {**config_of(FP32, stage, 2), "checkpointing": {"policy": policy}}
            name = f"{policy}, {stage}"
            seen[name], masters[name] = trained(tied(), windows_of([2, 2]), config)
    return seen, masters


def greedy(model, length):
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, model.logits(ids)[:, -1:].argmax(-1)], dim=1)
    return ids.tolist()


def between(folder):
    """Evaluation, text and edits between updates, and whole states."""
    values = {}
    windows = windows_of([2, 2], updates=4)
    rank = dist.get_rank()
    for stage in STAGES:
        texts, errors = [], []

        def look(engine, number, texts=texts, errors=errors):
            with engine.gathered():  # ranks need not do the same inside
                texts.append(greedy(engine.model, 4 + 3 * rank))
                same = copy.deepcopy(engine.model)
            texts.append(greedy(same, 4 + 3 * rank))
            with torch.no_grad(), engine.forward_scope():
                errors.append(float(engine.model(**batch(2, 12, seed=number))))

        quiet, _ = trained(tiny(), windows, config_of(Recipe(), stage, 2))
        looked, _ = trained(tiny(), windows, config_of(Recipe(), stage, 2), look)
        values[f"unchanged {stage}"] = quiet == looked
        values[f"texts {stage}"] = texts
        values[f"evaluations {stage}"] = errors
        values[f"edited {stage}"] = edited(windows, stage)
    last = config_of(Recipe(), 3, 2, reduce="last")
    values["state 3 last"] = trained(tiny(), windows, last)[0]["state"]
    values["state 0"] = trained(tiny(), windows, config_of(Recipe(), 0, 2))[0]["state"]
    values["refused"] = refused()
    return values


def edited(windows, stage):
    """Every rank writes other values; those of the writer hold."""
    rank = dist.get_rank()
    recipe = Recipe(parameters=torch.bfloat16, autocast=torch.bfloat16)

    def edit(engine, number):
        if number != 1:
            return
        with engine.gathered(writer=0), torch.no_grad():
            engine.model.head.bias.fill_(0.5 + rank)
        assert (engine.master("head.bias") == 0.5).all()
        assert (engine.state_dict()["head.bias"] == 0.5).all()

    return trained(tiny(), windows, config_of(recipe, stage, 2), edit)[0]


def refused():
    """What a model at stage 3 says when it is touched outside."""
    model = tiny()
    engine = poise.Engine(model, config_of(Recipe(), 3))
    messages = []
    for touch in (lambda: model.blocks[0].up.weight.sum(), model.state_dict):
        try:
            touch()
        except RuntimeError as error:
            messages.append(str(error))
    assert engine.updates == 0
    return messages


def held_by_process():
    """Threads and bytes of this process, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["Threads"]), int(fields["VmRSS"].split()[0]) << 10


def many(folder):
    """Engines one after another leave nothing behind."""
    group, seen = poise.comm.group_for(None, "cpu"), []
    window = windows_of([1, 1], updates=1)[0][dist.get_rank()]
    for number in range(50):
        model = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(WIDTH, 50_000))
        engine = poise.Engine(model, config_of(Recipe(), number % 4), group=group)
        engine.step(window, lambda piece, model=model: model(torch.ones(2, WIDTH)).square().mean())
        del engine, model
        gc.collect()
        seen.append(held_by_process())
    return seen


def held(folder):
    """Rank 0 still holds its first engine when rank 1, whose collector ran, makes a second one."""
    windows, kept, digests = windows_of([1, 1], updates=2), [], []
    keeps = (lambda engine, _: kept.append(engine)) if dist.get_rank() == 0 else None
    for _ in range(3):
        digests.append(trained(tiny(), windows, config_of(Recipe(), 1), keeps)[0]["masters"])
        gc.collect()
    return digests


CASES = {
    "held": held,
    "grid": grid,
    "uneven": uneven,
    "shapes": shapes,
    "between": between,
    "many": many,
}


if __name__ == "__main__":
    rank_processes.main(CASES)
