"""One of two ranks on pretend GPUs of their own, for test_pretend_ranks.py: started by rank_processes.

Its process group has gloo for the CPU and torch's NCCL group for the GPUs. Where rank 1 sees two GPUs
it is on cuda:1, which is not the current device of a new thread.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import poise
import pretend_gpu
import rank_processes
import torch
import torch.distributed as dist
from plain_loop import Recipe
from test_trainer import Rows, arguments
from tiny_models import batch, counted, split, tiny
from trainer_on_ranks import SAMPLES, SETTINGS, Classes, accuracy, class_rows
from training_on_ranks import config_of, digest, masters_of

HALF = Recipe(parameters=torch.bfloat16)
STATES = {"optimizer": "host", "staging_bytes": 1 << 18, "block_bytes": 4096}
ACTIVATIONS = {"activations": "host", "activation_min_bytes": 1}
# Stage, its other settings, and what is offloaded.
TRAININGS = {
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
    "stage 2, states and gradients in a file": (
        2, {}, {**STATES, "optimizer": "file", "gradients": "file"},
    ),
    "stage 3, all away": (
        3, {}, {**STATES, "gradients": "host", "parameters": "host", **ACTIVATIONS},
    ),
}  # fmt: skip


def train(device: str, recipe: Recipe, stage: int, zero: Any, offload: Any, policy: str) -> Any:
    dtype = recipe.parameters or torch.float32
    model = tiny().to(device, dtype)
    config = config_of(recipe, stage, 2, **zero)
    config["precision"]["autocast"] = False
    if "file" in offload.values():
        offload = {**offload, "directory": tempfile.gettempdir()}
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


def training(folder: Path) -> Any:
    own_gpu = f"cuda:{torch.cuda.current_device()}"
    seen: dict[str, Any] = {}
    for name, (stage, zero, offload) in TRAININGS.items():
        for more, recipe, policy in (
            ("fp32", Recipe(), "none"),
            ("16 bits, recompute", HALF, "every_n"),
        ):
            seen[f"{name}, {more}"] = {
                device.partition(":")[0]: train(device, recipe, stage, zero, offload, policy)
                for device in ("cpu", own_gpu)
            }
    return seen


def collectives(folder: Path) -> Any:
    """Which of torch's give what those of gloo give; more than fits into the ranks' memory at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(size * 300_000).remainder(1000).float() + rank
    part = torch.zeros(300_000)

    def sent(to: torch.Tensor, values: torch.Tensor) -> None:
        peer = 1 - rank
        both = [dist.P2POp(dist.isend, values, peer), dist.P2POp(dist.irecv, to, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    calls = {
        "all_reduce": lambda whole, part: dist.all_reduce(whole),
        "maximum": lambda whole, part: dist.all_reduce(whole, dist.ReduceOp.MAX),
        "doubles": lambda whole, part: dist.all_reduce(whole.double()),
        "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part + rank),
        "all_to_all": lambda whole, part: dist.all_to_all_single(whole, whole * 2),
        "broadcast": lambda whole, part: dist.broadcast(whole, 1),
        "messages": lambda whole, part: sent(part, whole[:300_000]),
    }
    same = {}
    for name, call in calls.items():
        on_cpu, on_gpu = (
            [whole.to(device, copy=True), part.to(device, copy=True)] for device in ("cpu", "cuda")
        )
        call(*on_cpu)
        call(*on_gpu)
        same[name] = all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))
    return same


def waits(folder: Path) -> Any:
    """A collective holds up a stream and not the host: ranks talk over the store in between."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    values = torch.ones(4, device="cuda")
    if rank == 1:
        store.wait(["rank 0 has called"])
    work = dist.all_reduce(values, async_op=True)
    over_at_once = work.is_completed()
    if rank == 0:
        store.set("rank 0 has called", "")
        store.wait(["rank 1 is through"])  # though rank 0 asks for nothing of its stream meanwhile
    work.wait()
    seen = values.tolist()
    store.set("rank 1 is through", "")
    return [over_at_once and rank == 0, seen]


def out_of_memory(folder: Path) -> Any:
    """In the second update of rank 1; what each rank saw, by update."""
    said = []
    model = tiny().to("cuda")
    engine = poise.Engine(model, config_of(Recipe(), 3, 2))
    for update in range(3):
        window = split(batch(8, 12, seed=update), 2)[dist.get_rank() :: 2]

        def loss(piece: Any, update: int = update) -> Any:
            if update == 1 and dist.get_rank() == 1:
                torch.empty(1 << 40, device="cuda")
            piece = {name: x.to("cuda") for name, x in piece.items()}
            return model(**piece), counted(piece)

        try:
            said.append(str(engine.step(window, loss).status))
        except torch.OutOfMemoryError as error:
            said.append(str(error))
    return said


class Watch(poise.TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.losses.append(details["result"].loss)


def trainer(folder: Path) -> Any:
    """A run, its evaluation and predictions, and the rest of it from its save; CPU and GPU."""
    seen: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        for name, changes in {
            "stage 0": {"memory_budget": "64MiB"},
            "stage 2": {"zero_stage": 2},
            "stage 3": {"zero_stage": 3, "gradient_checkpointing": True},
        }.items():
            place = folder / f"{device} {name}"
            settings = {**SETTINGS, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4}
            settings |= {"use_cpu": device == "cpu", **changes}
            parts = []
            for resume in (None, str(place / "checkpoint-4")):
                watch = Watch()
                run = poise.Trainer(
                    tiny(), arguments(place, **settings), train_dataset=Rows(SAMPLES),
                    eval_dataset=Rows(5, seed=9), callbacks=[watch],
                )  # fmt: skip
                run.train(resume_from_checkpoint=resume)
                state = {key: value.cpu() for key, value in run.engine.state_dict().items()}
                parts.append([watch.losses, run.evaluate()["eval_loss"], digest(state)])
            seen[f"{device}, {name}"] = parts
        seen[f"{device}, backend"] = run.engine.group.backend
        predicts = poise.Trainer(
            Classes(), arguments(folder / "classes", **{**SETTINGS, "use_cpu": device == "cpu"}),
            compute_metrics=accuracy,
        )  # fmt: skip
        output = predicts.predict(class_rows(5))
        seen[f"{device}, predictions"] = [
            output.predictions.tolist(),
            output.metrics["test_accuracy"],
        ]
    return seen


def ends(folder: Path) -> Any:
    """Rank 1 is killed, or raises, in a loop without end; what rank 0 is told, and how long it took."""
    how = folder.name
    model = tiny().to("cuda")
    engine = poise.Engine(model, config_of(Recipe(), 2, 1))
    begun = time.monotonic()

    def loss(piece: Any) -> Any:
        if dist.get_rank() == 1 and time.monotonic() - begun > 1.5:  # names are known after a beat
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad row")
        piece = {name: x.to("cuda") for name, x in piece.items()}
        return model(**piece), counted(piece)

    try:
        while True:
            engine.step([batch(2, 12, seed=0)], loss)
    except (poise.Error, ValueError) as error:
        return [f"{type(error).__name__}: {error}", time.monotonic() - begun]


CASES = {
    "training": training,
    "collectives": collectives,
    "waits": waits,
    "out_of_memory": out_of_memory,
    "trainer": trainer,
    "killed": ends,
    "raises": ends,
}
ENDS = {"killed", "raises"}  # cases after which there is nobody to meet


def main(names: str, folder: Path) -> None:
    pretend_gpu.switch_on()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl")
    seen = {name: CASES[name](folder / name) for name in names.split()}
    rank_processes.report(names, folder, dist.get_rank(), seen)
    if not ENDS & seen.keys():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
