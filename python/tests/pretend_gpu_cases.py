"""Saves, memory, recomputation and the Trainer on the pretend GPU, for test_pretend_gpu.py."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import poise
import pretend_gpu
import torch
from poise.models.byte_gpt import ByteGPT
from safetensors import safe_open
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

STATE_AWAY = {"optimizer": "file", "staging_bytes": 1 << 18, "block_bytes": 4096}


class Training:
    """A small model in an engine, and the row of its losses."""

    def __init__(self, device: str, dropout: float = 0.0, seed: int = 0, **sections: Any) -> None:
        torch.manual_seed(seed)
        self.device = device
        model = ByteGPT(layers=2, width=32, heads=2, sequence_length=16, dropout=dropout, seed=seed)
        config = {"batch": {"accumulation": 2}, "optimizer": {"lr": 0.01}, **sections}
        self.engine = poise.Engine(model.to(device), config)

    def train(self, begin: int, end: int) -> list[float]:
        model, count = self.engine.model, torch.tensor(32, device=self.device)
        losses = []
        for update in range(begin, end):
            generator = torch.Generator().manual_seed(update)
            rows = torch.randint(256, (2, 2, 17), generator=generator).to(self.device)
            with sdpa_kernel(SDPBackend.MATH):
                result = self.engine.step(
                    list(rows), lambda piece: (model.loss(piece[:, :-1], piece[:, 1:]), count)
                )
            losses.append(result.loss)
        return losses

    def masters(self) -> list[torch.Tensor]:
        names = [name for name, _ in self.engine.model.named_parameters()]
        return [self.engine.master(name).cpu() for name in names]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def memory_by_account(folder: Path) -> Any:
    """The ledger of one run on the CPU and of the same on the GPU."""
    seen = {}
    for name, sections in {
        "plain": {},
        "16 bits": {"precision": {"dtype": "bf16", "parameters": "bf16", "autocast": False}},
        "optimizer to host": {"offload": {"optimizer": "host"}},
        "recompute": {"checkpointing": {"policy": "every_n"}},
    }.items():
        seen[name] = {}
        for device in ("cpu", "cuda"):
            training = Training(device, **sections)
            training.train(0, 2)
            seen[name][device] = training.engine.memory()
    return seen


def recompute_with_dropout(folder: Path) -> Any:
    """Masks come from the GPU's generator, which recomputation must set back."""
    seen = {}
    for policy in ("none", "every_n", "selective"):
        training = Training("cuda", dropout=0.3, checkpointing={"policy": policy})
        seen[policy] = training.train(0, 3)
        seen[policy].append(sum(float(m.double().sum()) for m in training.masters()))
    return seen


def gradients_are_lent(folder: Path) -> Any:
    """The norm of one, and the masters after it was halved."""
    away = {"optimizer": "host", "gradients": "host"}
    offloads = {"nothing": {}, "states": away, "all": {**away, "parameters": "host"}}
    seen = {}
    for device in ("cpu", "cuda"):
        for name, offload in offloads.items():
            training = Training(device, offload=offload)
            engine, model = training.engine, training.engine.model
            rows = torch.arange(34, device=device).reshape(2, 17)
            with sdpa_kernel(SDPBackend.MATH):
                for _ in range(2):
                    loss = engine(rows[:, :-1]).flatten(0, 1)
                    engine.backward(
                        nn.functional.cross_entropy(loss, rows[:, 1:].flatten()), tokens=32
                    )
            engine.begin_update()
            gradient = engine.gradient("blocks.1.fc.weight")
            assert gradient.device == model.head.weight.device
            norm = gradient.double().norm().item()
            gradient.mul_(0.5)
            engine.step()
            sums = [master.double().sum().item() for master in training.masters()]
            seen[f"{device}, {name}"] = [norm, sums]
    return seen


def goes_back_where_it_came_from(folder: Path) -> Any:
    """Kinds of devices of a parameter and of two buffers: in the engine, and given back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_buffer("here", torch.ones(2))
    model.register_buffer("there", torch.ones(2, device="cuda"))
    engine = poise.Engine(model, {"offload": {"parameters": "host"}}, device="cuda")
    tensors = (model[0].weight, model.here, model.there)
    inside = [t.device.type for t in (model.here, model.there)]
    engine.give_back()
    return [inside, [t.device.type for t in tensors], bool((model.there.cpu() == 1).all())]


def saves_go_between_devices(folder: Path) -> Any:
    """From one device to the other, states in memory or in a file: the next updates are the same."""
    seen = {}
    file = {"offload": {**STATE_AWAY, "directory": str(folder)}}
    ways = [("cuda", {}, "cpu", {}), ("cpu", {}, "cuda", {}),
            ("cuda", file, "cpu", file), ("cpu", file, "cuda", file)]  # fmt: skip
    for source, its_sections, target, sections in ways:
        name = f"{source} to {target}, {'file' if sections else 'memory'}"
        unbroken = Training(source, **its_sections)
        unbroken.train(0, 2)
        path = unbroken.engine.save(folder / name)
        want = unbroken.train(2, 4)
        resumed = Training(target, seed=1, **sections)
        resumed.engine.load(path)
        got = resumed.train(2, 4)
        seen[name] = [got == want, same(resumed.masters(), unbroken.masters())]
    return seen


def saves_hold_the_generator(folder: Path) -> Any:
    unbroken = Training("cuda", dropout=0.3)
    unbroken.train(0, 2)
    path = Path(unbroken.engine.save(folder / "generator"))
    want = unbroken.train(2, 4)
    resumed = Training("cuda", dropout=0.3, seed=1)
    resumed.engine.load(path)
    with safe_open(path / "rank-00000.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith("random")]
    return {"same": resumed.train(2, 4) == want, "names": sorted(names)}


def save_while_training_goes_on(folder: Path) -> Any:
    """What is saved is the state of that moment, though the next update overwrites it at once."""
    asynchronous = {"state": {"asynchronous": True}}
    moving, still = Training("cuda", **asynchronous), Training("cuda")
    moving.train(0, 2)
    path = moving.engine.save(folder / "moving")
    moving.train(2, 6)
    moving.engine.finish_save()
    still.train(0, 2)
    loaded = Training("cuda", seed=1)
    loaded.engine.load(path)
    return same(loaded.masters(), still.masters())


def budget_runs_out(folder: Path) -> Any:
    # The allocator keeps both, for large and for small tensors, and would not ask the driver again.
    sizes = [200 << 20] + [1 << 19] * 16
    before = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    del before
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to("cuda")
    engines = [poise.Engine(model, {"memory": {"budget_bytes": "64MiB"}})]

    def step(rows: int) -> Any:
        data = torch.ones(rows, 256, device="cuda")
        return engines[0].step([data], lambda x: (model(x).square().mean(), len(x)))

    seen = {}
    try:
        step(20_000)  # 20 MB an activation
    except torch.OutOfMemoryError as error:
        seen["said"] = str(error)
    seen["updates"] = [engines[0].updates, step(100).updates]
    seen["held"] = torch.cuda.memory_allocated()
    # Another one's limit stays where this one's ends, and is gone with the last.
    engines.append(poise.Engine(nn.Linear(8, 8).to("cuda"), {"memory": {"budget_bytes": "96MiB"}}))
    seen["limits"] = []
    while engines:
        del engines[0]
        gc.collect()
        seen["limits"].append(fits_on_the_gpu(128 << 20))
    return seen


def fits_on_the_gpu(size: int) -> bool:
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    torch.cuda.empty_cache()
    return True


def host_waits(folder: Path) -> Any:
    """How often the host waits for the device in a window, by its micro-batches; the first window."""
    waits = ctypes.CDLL(None).pretend_gpu_host_waits
    waits.restype = ctypes.c_size_t
    seen = {}
    for name, precision in {
        "fp32": {},
        "bf16": {"dtype": "bf16", "parameters": "bf16"},
        "fp16": {"dtype": "fp16"},
    }.items():
        training = Training("cuda", precision=precision)
        engine, model = training.engine, training.engine.model
        rows, count = torch.ones(8, 2, 17, dtype=torch.int64), torch.tensor(32, device="cuda")
        pieces = list(rows.to("cuda"))
        seen[name] = []
        for micro_batches in (1, 1, 8):
            before = waits()
            with sdpa_kernel(SDPBackend.MATH):
                engine.step(
                    pieces[:micro_batches],
                    lambda p, model=model, n=count: (model.loss(p[:, :-1], p[:, 1:]), n),
                )
            seen[name].append(waits() - before)
    return seen


def models_on_two_devices(folder: Path) -> Any:
    model = nn.Sequential(nn.Linear(4, 4).to("cuda"), nn.Linear(4, 4))
    seen = {}
    try:
        poise.Engine(model)
    except poise.Error as error:
        seen["said"] = str(error)
    seen["left"] = [str(p.device) for p in model.parameters()]
    return seen


def host_memory_is_pinned(folder: Path) -> Any:
    """Bytes that are pinned, where the budget for it is what it is or nothing."""
    pinned_bytes = ctypes.CDLL(None).pretend_gpu_pinned_bytes
    pinned_bytes.restype = ctypes.c_size_t
    offload = {"optimizer": "host", "gradients": "host"}
    seen = {}
    for name, more in {"pinned": {}, "pageable": {"pinned_budget_bytes": 0}}.items():
        before = pinned_bytes()
        training = Training("cuda", offload={**offload, **more})
        training.train(0, 1)
        seen[name] = pinned_bytes() - before
        seen["needed"] = 16 * sum(p.numel() for p in training.engine.model.parameters())
        del training
    return seen


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "n": len(labels)}


def trainer(folder: Path) -> Any:
    """On the GPU by itself; with a budget it finds micro-batch and accumulation."""
    torch.manual_seed(1)
    values = torch.randn(96, 8)
    data = [{"x": x, "labels": x[:3].argmax()} for x in values]
    seen = {}
    for name, batch in {
        "plain": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
        "budget": {"memory_budget": "64MiB", "global_batch_size": 32},
    }.items():
        arguments = poise.TrainingArguments(
            output_dir=str(folder / name), max_steps=24, learning_rate=1e-2, logging_steps=2,
            save_steps=12, report_to="none", **batch,
        )  # fmt: skip
        made = poise.Trainer(
            model=Classifier(), args=arguments, train_dataset=data, eval_dataset=data[:10]
        )
        made.train()
        rows = [row for row in made.state.log_history if "loss" in row]
        seen[name] = {
            "device": next(made.model.parameters()).device.type,
            "losses": [rows[0]["loss"], rows[-1]["loss"]],
            "evaluated": made.evaluate()["eval_loss"],
            "saves": sorted(p.name for p in (folder / name).glob("checkpoint-*")),
        }
    return seen


CASES = [
    memory_by_account,
    recompute_with_dropout,
    gradients_are_lent,
    goes_back_where_it_came_from,
    saves_go_between_devices,
    saves_hold_the_generator,
    save_while_training_goes_on,
    budget_runs_out,
    host_waits,
    models_on_two_devices,
    host_memory_is_pinned,
    trainer,
]


if __name__ == "__main__":
    pretend_gpu.run_cases(CASES)
