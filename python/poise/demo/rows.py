"""The rows of the demo: one training, split and stored in different ways, and the budget for those
that have one."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from poise.demo import DemoError

BUDGET_STEP = 64 << 10

# What lives away from the device, by the word for it.
OFFLOADED: dict[str, dict[str, str]] = {
    "none": {},
    "states": {"optimizer": "host"},
    "all": {
        "optimizer": "file",
        "gradients": "host",
        "parameters": "host",
        "activations": "host",
    },
}


@dataclasses.dataclass(frozen=True)
class Size:
    """What is the same in every row."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    sequence_length: int = 128
    samples: int = 16  # of one update: 2,048 bytes, which are the tokens here
    updates: int = 40  # of a row whose curve is compared
    half_updates: int = 3  # of a 16-bit row: many CPUs multiply those matrices slowly
    long_updates: int = 160
    validation_samples: int = 64
    sample_bytes: int = 160

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence_length


FULL = Size()
QUICK = Size(
    layers=2,
    width=32,
    heads=2,
    sequence_length=32,
    updates=7,
    half_updates=2,
    long_updates=12,
    validation_samples=16,
    sample_bytes=40,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to do the training."""

    name: str
    language: str  # cpp, python
    accumulation: int = 1
    precision: str = "fp32"
    half_parameters: bool = False  # 16-bit parameters with fp32 masters, not fp32 under autocast
    checkpointing: str = "none"
    loss_chunk_tokens: int = 0
    ranks: int = 1
    stage: int = 0  # of ZeRO: 1 optimizer states sharded, 2 gradients too, 3 parameters too
    kind: str = "parity"  # half (16-bit, few updates), misfit (must not fit), long (trains on)
    budgeted: bool = False
    offload: str = "none"  # a key of OFFLOADED
    states_over_budget: int = 0  # a budget of its own: so many times smaller than the plain states

    @property
    def has_budget(self) -> bool:
        return self.budgeted or self.states_over_budget > 0

    @property
    def slug(self) -> str:
        words = "".join(c if c.isalnum() else " " for c in f"{self.name} {self.language}")
        return "_".join(words.lower().split())

    @property
    def title(self) -> str:
        return f"{self.name} ({'C++' if self.language == 'cpp' else 'Python'})"

    def micro_batch(self, size: Size) -> int:
        return size.samples // (self.accumulation * self.ranks)

    def updates(self, size: Size) -> int:
        if self.kind == "half":
            return size.half_updates
        return size.long_updates if self.kind == "long" else size.updates


def all_rows() -> list[Row]:
    """In the order they run; the first is what the others are compared with."""
    bf16 = {"precision": "bf16", "kind": "half"}
    lean = {
        "accumulation": 16,
        "checkpointing": "every_n",
        "loss_chunk_tokens": 64,
        "budgeted": True,
    }
    return [
        Row("plain big batch", "cpp"),
        Row("plain big batch", "python"),
        Row("accumulation 4", "cpp", 4),
        Row("accumulation 4", "python", 4),
        Row("accumulation 8", "cpp", 8),
        Row("accumulation 16", "cpp", 16),
        Row("accumulation 4 + checkpointing", "python", 4, checkpointing="every_n"),
        Row("bf16 + accumulation 4", "cpp", 4, half_parameters=True, **bf16),
        Row("fp16 + loss scaling + accumulation 4", "python", 4, "fp16", kind="half"),
        Row("plain big batch, budget", "cpp", kind="misfit", budgeted=True),
        Row("everything in fp32, budget", "cpp", **lean),
        Row("everything with bf16, budget", "cpp", half_parameters=True, **lean, **bf16),
        *(
            Row(f"2 ranks, stage {n} + accumulation 4", "cpp", 4, ranks=2, stage=n)
            for n in (1, 2, 3)
        ),
        Row("optimizer offload", "cpp", offload="states"),
        Row(
            "hybrid: accumulation 4 + checkpointing + offload",
            "python",
            4,
            checkpointing="every_n",
            offload="all",
        ),
        Row(
            "hybrid, budget of a third of its states",
            "cpp",
            16,
            checkpointing="every_n",
            loss_chunk_tokens=64,
            offload="all",
            states_over_budget=3,
        ),
        Row("accumulation 4, longer", "cpp", 4, kind="long"),
    ]


def quick_rows() -> list[Row]:
    """Of every kind one: most of a tiny row's time is the start of its process."""
    left_out = {
        ("plain big batch", "python"),
        ("accumulation 8", "cpp"),
        ("accumulation 16", "cpp"),
        ("optimizer offload", "cpp"),
        # A tiny model's unit of embeddings alone is a quarter of its states.
        ("hybrid, budget of a third of its states", "cpp"),
        ("2 ranks, stage 1 + accumulation 4", "cpp"),
        ("2 ranks, stage 2 + accumulation 4", "cpp"),
    }
    return [row for row in all_rows() if (row.name, row.language) not in left_out]


def choose_budget(plain_peak: int, lean_peak: int) -> int:
    """Bytes between two measured peaks, a tenth of the way up from the lean one.

    Args:
      plain_peak: of a row that must not fit.
      lean_peak: of a row that holds more than those that must.
    """
    if lean_peak >= plain_peak:
        raise DemoError(
            f"[demo] the leanest row held {lean_peak} bytes and the plain one {plain_peak}; "
            "no budget lies between them, so memory was not saved"
        )
    steps = (lean_peak + (plain_peak - lean_peak) / 10) / BUDGET_STEP
    return math.ceil(steps) * BUDGET_STEP


def run_settings(row: Row, size: Size, corpus: Path, folder: Path, budget: int) -> dict[str, Any]:
    """The run.json of a row: what `poise train` reads, and the Python rows too."""
    micro_batch = row.micro_batch(size)
    # Shorter rows follow the same schedule, so that their curves lie over the others.
    schedule_updates = size.long_updates if row.kind == "long" else size.updates
    precision: dict[str, Any] = {"dtype": row.precision}
    if row.half_parameters:
        precision["parameters"] = row.precision
    if row.precision == "fp16":
        precision["loss_scale_growth_interval"] = 3  # so that it is seen to move
    return {
        "batch": {"micro_batch_size": micro_batch, "accumulation": row.accumulation},
        "precision": precision,
        "optimizer": {"type": "adamw", "lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0},
        "schedule": {
            "type": "cosine",
            "warmup_updates": max(1, schedule_updates // 8),
            "total_updates": schedule_updates,
        },
        "checkpointing": {"policy": row.checkpointing},
        "zero": {"stage": row.stage},
        "memory": {"budget_bytes": budget if row.has_budget else 0},
        "offload": _offload(row, folder),
        "engine": {"seed": 1},
        "model": {
            "builtin": "byte_gpt",
            "layers": size.layers,
            "width": size.width,
            "heads": size.heads,
            "sequence_length": size.sequence_length,
            "dropout": 0,
            "loss_chunk_tokens": row.loss_chunk_tokens,
        },
        "data": {"train": [str(corpus)], "validation_fraction": 0.02, "shuffle": True},
        "train": {
            "output_dir": str(folder),
            "max_updates": row.updates(size),
            "log_every": 1,
            # The same samples whatever the micro-batch.
            "validation_batches": max(1, size.validation_samples // micro_batch),
            "sample_bytes": size.sample_bytes if row.kind == "long" else 0,
        },
    }


def _offload(row: Row, folder: Path) -> dict[str, Any]:
    places = OFFLOADED[row.offload]
    settings: dict[str, Any] = {**places, "block_bytes": 1 << 18, "staging_bytes": 4 << 20}
    if "activations" in places:
        settings["activation_min_bytes"] = 16 << 10
    if "file" in places.values():
        settings["directory"] = str(folder / "scratch")
    return settings if places else {}
