"""One rank of test_shard_groups.py: `groups_on_ranks.py CASE FOLDER`, started by rank_processes."""

from __future__ import annotations

import poise
import rank_processes
import torch
import torch.distributed as dist
from poise.engine import Engine
from test_trainer import Rows, arguments
from tiny_models import batch, tiny
from training_on_ranks import FP32, config_of, masters_of, trained, windows_of

STAGES = (1, 2, 3)


def held_optimizer(engine):
    """Bytes of masters and moments on this rank."""
    return engine.memory()["current"]["optimizer"]


def message_of(call):
    try:
        call()
    except poise.Error as error:
        return str(error)
    return ""


def settings(folder):
    """Trainings whose settings divide the ranks, beside undivided ones."""
    windows = windows_of([1] * dist.get_world_size(), updates=3)
    seen, masters, bytes_of = {}, {}, {}
    for stage in STAGES:
        for size in (0, 1, 2):

            def look(engine, _, key=f"{stage}, {size}"):
                bytes_of[key] = held_optimizer(engine)

            config = config_of(FP32, stage, shard_group_size=size)
            seen[f"{stage}, {size}"], masters[f"{stage}, {size}"] = trained(
                tiny(), windows, config, look
            )
    whole = poise.comm.group_for(None, "cpu")
    odd = config_of(FP32, 3, shard_group_size=3)
    value = {
        "seen": seen,
        "bytes": bytes_of,
        "odd": message_of(lambda: Engine(tiny(), odd)),
        "not torch's": message_of(
            lambda: Engine(
                tiny(), config_of(FP32, 3, shard_group_size=2), group=poise.comm.fake(0, 4)
            )
        ),
        "by hand": held_optimizer(
            Engine(tiny(), config_of(FP32, 3, shard_group_size=2), group=poise.comm.hybrid(2))
        ),
        "wrapped": held_optimizer(
            Engine(tiny(), config_of(FP32, 3, shard_group_size=2), group=whole)
        ),
        "other": message_of(
            lambda: Engine(
                tiny(), config_of(FP32, 3, shard_group_size=1), group=poise.comm.hybrid(2)
            )
        ),
    }
    return value, masters


def faces(folder):
    """The same from a Trainer's arguments and from DeepSpeed's JSON, on two ranks: groups of one."""
    value = {}
    for size in (0, 1):
        args = arguments(
            folder / f"trainer{size}", zero_stage=3, zero_shard_group_size=size, max_steps=2
        )
        trainer = poise.Trainer(tiny(), args, train_dataset=Rows())
        trainer.train()
        value[f"trainer {size}"] = held_optimizer(trainer.engine)
    keys = {
        "neither": {},
        "mics": {"mics_shard_size": 1},
        "hpz off": {"zero_hpz_partition_size": 1},
    }
    for name, more in keys.items():
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, **more},
        }
        engine, *_ = poise.initialize(model=tiny(), config=settings)
        value[name] = held_optimizer(engine.engine)
        engine.backward(engine(**batch(2, 8, seed=dist.get_rank())))
        engine.step()
        value[f"{name}, masters"] = sum(float(m.sum()) for m in masters_of(engine.engine).values())
    odd = poise.TrainingArguments
    value["odd"] = message_of(lambda: odd(zero_stage=2, zero_shard_group_size=3, use_cpu=True))
    value["stage 0"] = message_of(lambda: odd(zero_shard_group_size=2, use_cpu=True))
    return value


def lost(folder):
    """What rank 2 hears of the end of rank 3, its partner."""
    shard = poise.comm.hybrid(2).shard
    if dist.get_rank() == 3:
        shard.abort("no more tokens")
    return message_of(lambda: shard.barrier("end")) if dist.get_rank() == 2 else ""


CASES = {"settings": settings, "faces": faces, "lost": lost}


if __name__ == "__main__":
    torch.manual_seed(0)
    rank_processes.main(CASES)
