"""The whole step: against a plain torch loop, C++ against Python, and its peak over long windows."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from poise import Engine
from poise.bench.optimizer import _time as timed
from poise.models.byte_gpt import ByteGPT

MODEL = {"layers": 4, "width": 128, "heads": 4, "sequence_length": 128}
MICRO_BATCH, ACCUMULATION = 4, 4
OPTIMIZER = {"lr": 3e-4, "beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0}

Batch = tuple[torch.Tensor, torch.Tensor]


def _window(micro_batches: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    shape = (MICRO_BATCH, MODEL["sequence_length"] + 1)
    rows = [torch.randint(256, shape, generator=generator) for _ in range(micro_batches)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


class _Poise:
    def __init__(self, micro_batches: int = ACCUMULATION) -> None:
        self.model = ByteGPT(**MODEL)
        config = {
            "batch": {"micro_batch_size": MICRO_BATCH, "accumulation": micro_batches},
            "optimizer": {"type": "adamw", **OPTIMIZER},
        }
        self.engine = Engine(self.model, config)
        self.window = _window(micro_batches)

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        return self.model.loss(*batch), batch[1].numel()

    def step(self) -> object:
        return self.engine.step(self.window, self._loss)


class _PlainTorch:
    """The loop people write: accumulate, clip, fused AdamW; no decay on vectors, as poise has it."""

    def __init__(self) -> None:
        self.model = ByteGPT(**MODEL)
        decay = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay}, {"params": rest, "weight_decay": 0.0}],
            lr=OPTIMIZER["lr"],
            betas=(0.9, OPTIMIZER["beta2"]),
            weight_decay=OPTIMIZER["weight_decay"],
            fused=True,
        )
        self.window = _window(ACCUMULATION)

    def step(self) -> None:
        for inputs, targets in self.window:
            (self.model.loss(inputs, targets) / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER["max_grad_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def step_vs_torch(repeats: int = 20) -> Iterator[dict]:
    """fp32, accumulation 4, AdamW, clip: plain torch's time over poise's, interleaved."""
    calls = {"poise": _Poise().step, "torch": _PlainTorch().step}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            elapsed = timed(call)
            if repeat >= 2:
                seconds[name].append(elapsed)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    yield {
        "figure": "step_vs_torch",
        "value": round(median["torch"] / median["poise"], 3),
        "aim": 0.98,
        "better": "higher",
        **{f"{name}_ms": round(1e3 * value, 2) for name, value in median.items()},
    }


def _cpp_seconds(folder: Path, updates: int) -> float:
    """Median seconds per update that the C++ driver (`poise train`) reports."""
    data = folder / "bytes.bin"
    if not data.exists():
        generator = torch.Generator().manual_seed(3)
        data.write_bytes(bytes(torch.randint(256, (200_000,), generator=generator).tolist()))
    run = {
        "model": {"builtin": "byte_gpt", **MODEL},
        "data": {"train": [str(data)]},
        "batch": {"micro_batch_size": MICRO_BATCH, "accumulation": ACCUMULATION},
        "optimizer": {"type": "adamw", **OPTIMIZER},
        "train": {
            "output_dir": str(folder / "run"),
            "max_updates": updates,
            "log_every": 1,
            "validation_batches": 0,
        },
    }
    (folder / "run.json").write_text(json.dumps(run))
    command = [sys.executable, "-m", "poise", "train", str(folder / "run.json")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("tokens_per_second") for line in lines]
    tokens = MICRO_BATCH * ACCUMULATION * MODEL["sequence_length"]
    return tokens / statistics.median([rate for rate in rates if rate][2:])


def cpp_vs_python(rounds: int = 4, updates: int = 12) -> Iterator[dict]:
    """Time of an update driven from Python over one driven from C++, in alternating rounds."""
    python, cpp = [], []
    ours = _Poise()
    ours.step()
    with tempfile.TemporaryDirectory() as name:
        for _ in range(rounds):
            cpp.append(_cpp_seconds(Path(name), updates))
            python.append(statistics.median(timed(ours.step) for _ in range(updates)))
    seconds = {"python": statistics.median(python), "cpp": statistics.median(cpp)}
    yield {
        "figure": "cpp_vs_python",
        "value": round(seconds["python"] / seconds["cpp"], 3),
        "aim": 0.98,
        "better": "higher",
        **{f"{key}_ms": round(1e3 * value, 2) for key, value in seconds.items()},
    }


def peak_flat() -> Iterator[dict]:
    """Peak bytes of an update of 32 micro-batches over one of a single micro-batch."""
    peaks = {}
    for micro_batches in (1, 32):
        ours = _Poise(micro_batches)
        ours.step()
        peaks[micro_batches] = ours.step().peak_bytes
    yield {
        "figure": "peak_flat",
        "value": round(peaks[32] / peaks[1], 4),
        "aim": 1.01,
        "better": "lower",
        "peak_bytes_1": peaks[1],
        "peak_bytes_32": peaks[32],
    }
