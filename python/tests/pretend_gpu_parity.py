"""The same trainings on the CPU and on the pretend GPU, for test_pretend_gpu.py."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import poise
import pretend_gpu
import torch
from poise.models.byte_gpt import ByteGPT
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# 16-bit parameters without autocast: its lists of operators differ between CPU and CUDA.
PRECISIONS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16", "initial_loss_scale": 1024.0},
    "bf16 parameters": {"dtype": "bf16", "parameters": "bf16", "autocast": False},
    # A scale that overflows at first: updates are skipped on both alike.
    "fp16 parameters": {
        "dtype": "fp16", "parameters": "fp16", "autocast": False, "initial_loss_scale": 1e9,
    },
}  # fmt: skip
SMALL_BLOCKS = {"staging_bytes": 1 << 18, "block_bytes": 4096}
OFFLOADS = {
    "nothing": {},
    "optimizer to host": {"optimizer": "host", **SMALL_BLOCKS},
    "gradients to host": {"gradients": "host"},
    "all to host": {
        "optimizer": "host", "gradients": "host", "parameters": "host", **SMALL_BLOCKS,
    },
    "activations to host": {"activations": "host", "activation_min_bytes": 1024},
    "part of the optimizer to host": {
        "optimizer": "host", "optimizer_fraction": 0.4, **SMALL_BLOCKS,
    },
    "optimizer to file": {"optimizer": "file", **SMALL_BLOCKS},
    "gradients to file": {"gradients": "file", **SMALL_BLOCKS},
    "all to file": {
        "optimizer": "file", "gradients": "file", "parameters": "file", **SMALL_BLOCKS,
    },
    "activations to file": {
        "activations": "file", "activation_min_bytes": 1024, "block_bytes": 4096,
    },
    "all pageable": {
        "optimizer": "host", "gradients": "host", "parameters": "host", "pinned_budget_bytes": 0,
        **SMALL_BLOCKS,
    },
}  # fmt: skip
OF_16_BITS = ("nothing", "optimizer to host", "all to host", "activations to host")
OPTIMIZERS = {
    "adam": {"weight_decay": 0.01},
    "lamb": {"weight_decay": 0.01},
    "lars": {"momentum": 0.9},
    "lion": {"weight_decay": 0.01},
    "sgd": {"momentum": 0.9},
    "adafactor": {},
}
POLICIES = [{"policy": "every_n"}, {"policy": "first_m", "n": 1}, {"policy": "selective"}]


def cases() -> dict[str, dict[str, Any]]:
    """Sections of the configuration, and how the training is called (in `call`)."""
    made: dict[str, dict[str, Any]] = {}
    for precision, section in PRECISIONS.items():
        for offload in OFFLOADS if precision == "fp32" else OF_16_BITS:
            made[f"{precision}, {offload}"] = {"precision": section, "offload": OFFLOADS[offload]}
    for name, section in OPTIMIZERS.items():
        made[name] = {"optimizer": {"type": name, **section}}
        if name in ("adam", "lion", "sgd"):  # the others need whole parameters on the device
            made[f"{name}, all to host"] = {**made[name], "offload": OFFLOADS["all to host"]}
    for name, moments in (("adamw", "bf16"), ("adamw", "8bit"), ("lion", "8bit")):
        made[f"{name}, moments in {moments}"] = {"optimizer": {"type": name, "moments": moments}}
    for policy in POLICIES:
        made[f"recompute {policy['policy']}"] = {"checkpointing": policy}
        made[f"recompute {policy['policy']}, bf16, activations to host"] = {
            "checkpointing": policy,
            "precision": PRECISIONS["bf16"],
            "offload": OFFLOADS["activations to host"],
        }
    made["loss in chunks"] = {"call": {"loss_chunk_tokens": 8}}
    made["three calls"] = {"call": {"three": True}}
    made["three calls, fp16"] = {"call": {"three": True}, "precision": PRECISIONS["fp16"]}
    made["noise scale"] = {"engine": {"noise_scale": True}}
    return made


def digest(tensors: Any) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten()
        whole.update(flat.view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def train(
    device: str, folder: str, three: bool = False, loss_chunk_tokens: int = 0, **sections: Any
) -> dict[str, Any]:
    """What each update says, and digests of what was trained."""
    config: dict[str, Any] = {"batch": {"accumulation": 2}, **sections}
    config["optimizer"] = {"type": "adamw", "lr": 0.01, **sections.get("optimizer", {})}
    if "file" in sections.get("offload", {}).values():
        config["offload"] = {"directory": folder, **sections["offload"]}
    torch.manual_seed(0)
    model = ByteGPT(layers=2, width=32, heads=2, sequence_length=16, dropout=0.0,
                    loss_chunk_tokens=loss_chunk_tokens)  # fmt: skip
    model.to(device, DTYPES[sections.get("precision", {}).get("parameters", "fp32")])
    engine = poise.Engine(model, config)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(device, non_blocking=True)
        return model.loss(rows[:, :-1], rows[:, 1:])

    generator = torch.Generator().manual_seed(1)
    updates = []
    for _ in range(3):
        window = [torch.randint(256, (2, 17), generator=generator) for _ in range(2)]
        if three:
            for rows in window:
                engine.backward(loss(rows), tokens=32)
            result = engine.step()
        else:
            result = engine.step(window, lambda rows: (loss(rows), 32))
        updates.append([result.loss, repr(result.grad_norm), str(result.status), result.loss_scale])
    names = [name for name, _ in model.named_parameters()]
    return {
        "updates": updates,
        "state": digest(engine.state_dict().values()),
        "masters": digest(engine.master(name) for name in names),
    }


def parity(folder: Path) -> dict[str, Any]:
    seen = {}
    with sdpa_kernel(SDPBackend.MATH):
        for name, case in cases().items():
            sections = {key: value for key, value in case.items() if key != "call"}
            seen[name] = {
                device: train(device, str(folder), **case.get("call", {}), **sections)
                for device in ("cpu", "cuda")
            }
    return seen


if __name__ == "__main__":
    pretend_gpu.run_cases([parity])
