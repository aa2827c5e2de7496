"""One of two ranks on pretend GPUs of their own, for test_pretend_gpu.py: started by rank_processes.

Rank 1 is on cuda:1, which is not the current device of a new thread.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import poise
import pretend_gpu
import rank_processes
import torch
import torch.distributed as dist
from plain_loop import Recipe
from tiny_models import batch, counted, split, tiny
from training_on_ranks import config_of, digest, masters_of

HALF = Recipe(parameters=torch.bfloat16)
STATES = {"optimizer": "host", "staging_bytes": 1 << 18, "block_bytes": 4096}
ACTIVATIONS = {"activations": "host", "activation_min_bytes": 1}
# Stage, its other settings, and what is offloaded.
CASES = {
    "stage 0": (0, {}, {}),
    "stage 1": (1, {}, {}),
    "stage 2": (2, {}, {}),
    "stage 3": (3, {}, {}),
    "stage 3, joined once": (3, {"reduce": "last"}, {}),
    "stage 3, kept gathered": (3, {"keep_gathered": "window"}, {}),
    "stage 3, without overlap": (3, {"overlap": False}, {}),
    "stage 2, bf16 on the wire": (2, {"gradient_dtype": "bf16"}, {}),
    "stage 1, states away": (1, {}, STATES),
    "stage 2, states and gradients away": (2, {}, {**STATES, "gradients": "host"}),
    "stage 3, all away": (
        3, {}, {**STATES, "gradients": "host", "parameters": "host", **ACTIVATIONS},
    ),
}  # fmt: skip


def train(device: str, recipe: Recipe, stage: int, zero: Any, offload: Any, policy: str) -> Any:
    dtype = recipe.parameters or torch.float32
    model = tiny().to(device, dtype)
    config = config_of(recipe, stage, 2, **zero)
    config["precision"]["autocast"] = False
    engine = poise.Engine(
        model, {**config, "offload": offload, "checkpointing": {"policy": policy}}
    )
    updates = []
    for update in range(3):
        pieces = split(batch(8, 12, seed=update, masked=0.4), 2)[dist.get_rank() :: 2]
        window = [{name: x.to(device) for name, x in piece.items()} for piece in pieces]
        result = engine.step(window, lambda piece: (model(**piece), counted(piece)))
        updates.append([result.loss, result.grad_norm, result.tokens, str(result.status)])
    masters = {name: value.cpu() for name, value in masters_of(engine).items()}
    state = {name: value.cpu() for name, value in engine.state_dict().items()}
    return [updates, digest(masters), digest(state)]


def training() -> Any:
    own_gpu = f"cuda:{dist.get_rank()}"
    seen: dict[str, Any] = {}
    for name, (stage, zero, offload) in CASES.items():
        for more, recipe, policy in (
            ("fp32", Recipe(), "none"),
            ("16 bits, recompute", HALF, "every_n"),
        ):
            seen[f"{name}, {more}"] = {
                device.partition(":")[0]: train(device, recipe, stage, zero, offload, policy)
                for device in ("cpu", own_gpu)
            }
    return seen


if __name__ == "__main__":
    pretend_gpu.switch_on()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    pretend_gpu.init_process_group()
    rank_processes.report("training", sys.argv[2], int(os.environ["RANK"]), training())
    dist.barrier()
    dist.destroy_process_group()
