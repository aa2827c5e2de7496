"""What the ledger costs: a training step with the counting allocator in, and with it out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from poise import memory
from poise.bench.optimizer import _time as timed
from poise.models.byte_gpt import ByteGPT

# Small on purpose: the less a step computes, the more its allocations show.
MODEL = {"layers": 2, "width": 64, "heads": 4, "sequence_length": 64}
ROWS = 4


class _SmallStep:
    """Forward, backward and AdamW of a small model, in plain torch."""

    def __init__(self) -> None:
        self.model = ByteGPT(**MODEL)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(4)
        rows = torch.randint(256, (ROWS, MODEL["sequence_length"] + 1), generator=generator)
        self.inputs, self.targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def run(self) -> None:
        self.model.loss(self.inputs, self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def counted(self) -> int:
        """The same under a ledger; returns the peak that it saw."""
        with memory.Ledger() as ledger:
            self.run()
            return ledger.snapshot().peak_bytes


def counting_allocator_overhead(repeats: int = 400) -> Iterator[dict]:
    """Time of a small step under a ledger over the same step without one, interleaved, one thread."""
    step = _SmallStep()
    calls = {"with": step.counted, "without": step.run}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # threads that wait for each other hide the allocator behind their noise
    try:
        for repeat in range(repeats + 10):
            for name in sorted(calls, reverse=repeat % 2 == 1):  # neither is always the second
                elapsed = timed(calls[name])
                if repeat >= 10:
                    seconds[name].append(elapsed)
    finally:
        torch.set_num_threads(threads)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    yield {
        "figure": "counting_allocator_overhead",
        "value": round(median["with"] / median["without"], 3),
        "aim": 1.05,
        "better": "lower",
        **{f"{name}_ms": round(1e3 * value, 3) for name, value in median.items()},
    }
