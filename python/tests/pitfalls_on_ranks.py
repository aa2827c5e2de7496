"""One rank of test_pitfalls_on_ranks.py: `pitfalls_on_ranks.py CASE FOLDER`, started by rank_processes.

Models that use other parts of themselves in each micro-batch, window and rank. A case returns how far the
trained values are from those of one process in float64 that had all micro-batches.
"""

from __future__ import annotations

import poise
import rank_processes
import torch
import torch.distributed as dist
from torch import nn
from training_on_ranks import STAGES

LR = 0.1
OFFLOADS = {"": {}, "offloaded": {"optimizer": "host", "gradients": "host"}}


class Branches(nn.Module):
    """Runs the blocks that it is told; one is never told, one is tied to another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[2].weight = self.blocks[0].weight
        self.head = nn.Linear(8, 1)

    def forward(self, order, x):
        for number in order:
            x = self.blocks[number](x).tanh()
        return self.head(x).square().mean()


def rows(number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def config_of(stage, accumulation, **sections):
    return {
        "optimizer": {"type": "sgd", "lr": LR, "max_grad_norm": 0.0},
        "batch": {"accumulation": accumulation},
        "zero": {"stage": stage},
        **sections,
    }


def exact(windows):
    """The values after plain SGD in float64 over all ranks' micro-batches."""
    model = Branches().double()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    for window in windows:
        pieces = [piece for of_rank in window for piece in of_rank]
        sgd.zero_grad()
        for order, x in pieces:
            (model(order, x.double()) / len(pieces)).backward()
        sgd.step()
    return model.state_dict()


def distance(engine, values):
    state = engine.state_dict()
    return max(float((state[name].double() - value).abs().max()) for name, value in values.items())


def trained(windows, stage, **sections):
    model = Branches()
    config = config_of(stage, len(windows[0][0]), **sections)
    engine = poise.Engine(model, config, units=[nn.Linear])
    for window in windows:
        result = engine.step(window[dist.get_rank()], lambda piece: (model(*piece), 4))
        assert result.applied
    return distance(engine, exact(windows))


def windows_of(order_of, accumulation, updates=5):
    """order_of(update, rank, micro-batch): the blocks that run."""
    return [
        [
            [(order_of(u, r, k), rows(100 * u + 10 * r + k)) for k in range(accumulation)]
            for r in range(dist.get_world_size())
        ]
        for u in range(updates)
    ]


def alternating(folder):
    """Another branch in each micro-batch, and in each window where a window is one."""
    seen = {}
    for accumulation in (1, 4):
        windows = windows_of(lambda u, r, k, a=accumulation: [(u * a + k) % 3], accumulation)
        for stage in STAGES:
            for name, offload in OFFLOADS.items():
                key = f"{accumulation}, {stage}, {name}"
                seen[key] = trained(windows, stage, offload=offload)
    return seen


def by_rank(folder):
    """Another branch on each rank; at stage 3, where blocks are gathered, that is an error (test_unit_uses)."""
    windows = windows_of(lambda u, r, k: [(u + r + k) % 3], 2)
    return {str(stage): trained(windows, stage) for stage in STAGES[:3]}


def every_other_window(folder):
    """A block that has no gradient in every second window does not move in it."""
    windows = windows_of(lambda u, r, k: [0] if u % 2 else [0, 1], 2)
    return {
        f"{stage}, {name}": trained(windows, stage, offload=offload)
        for stage in STAGES
        for name, offload in OFFLOADS.items()
    }


def forwards(folder):
    """Two forwards before their backward, an evaluation between them, each time in another order."""
    orders = [[0, 1, 2], [2, 0, 1], [1, 1, 0], [2], [0, 2, 1, 0]]
    windows = windows_of(lambda u, r, k: orders[u][:: 1 - 2 * k], 2)
    seen = {}
    for stage in STAGES:
        model = Branches()
        engine = poise.Engine(model, config_of(stage, 1), units=[nn.Linear])
        for window in windows:
            one, two = window[dist.get_rank()]
            first = engine(*one)
            with torch.no_grad():
                engine(one[0][::-1], rows(5))
            engine.backward((first + engine(*two)) / 2, 1)
            assert engine.step().applied
            with torch.no_grad():
                engine([3], rows(6))
        seen[str(stage)] = distance(engine, exact(windows))
    return seen


def smaller_than_the_world(folder):
    """One element: all ranks but one have no shard. An infinity on any of them is an overflow on all."""
    seen = {}
    for stage in STAGES:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        precision = {"dtype": "fp16", "initial_loss_scale": 1024.0}
        engine = poise.Engine(model, config_of(stage, 1, precision=precision))

        def loss(x, bad, model=model):
            value, weight = model(x).sum(), model.weight.sum()
            # Finite, and its gradient is not.
            return (
                value + torch.sqrt(weight - weight.detach()) if dist.get_rank() == bad else value
            ), 1

        of_stage = []
        for bad in (0, dist.get_world_size() - 1, -1):
            result = engine.step([torch.ones(1, 1)], lambda x, b=bad: loss(x, b))
            of_stage.append([str(result.status), engine.loss_scale])
        seen[str(stage)] = [of_stage, float(engine.state_dict()["weight"])]
    return seen


def everything(folder):
    """All in one start of the ranks."""
    cases = (alternating, by_rank, every_other_window, forwards, smaller_than_the_world)
    return {case.__name__: case(folder) for case in cases}


if __name__ == "__main__":
    rank_processes.main({"everything": everything})
