"""One rank of test_placement.py: `placement_on_ranks.py CASE FOLDER`, started by rank_processes."""

from __future__ import annotations

import sys
from pathlib import Path

import rank_processes
import torch
import torch.distributed as dist
from balanced_runs import Net, engine_of, train
from poise import trainer_balance
from poise.config import settings_of


def run(folder, budget, **given):
    trainer, loss = train(folder, memory_budget=budget, **given)
    chosen, engine = trainer._found.chosen, trainer.engine
    return {
        "stage": settings_of(engine.config)["zero"]["stage"],
        "peak": engine.memory()["peak_bytes"],
        "budget": budget,
        "loss": loss,
        "samples": chosen.micro_batch * chosen.accumulation * dist.get_world_size(),
        "plan": trainer_balance.lines(trainer._found, budget, f"; stage {trainer.args.zero_stage}")[
            0
        ],
    }


def found(folder):
    states = sum(engine_of(Net()).memory()["current"].values())
    return {
        "wide": run(folder / "wide", 1 << 28),
        "tight": run(folder / "tight", int(1.3 * states)),
        "given": run(folder / "given", 1 << 28, zero_stage=0)["stage"],
    }


CASES = {"found": found}


def main(name, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank_processes.report(name, folder, dist.get_rank(), CASES[name](Path(folder)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
