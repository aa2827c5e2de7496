"""The optimizer stage against torch's chain and against a loop that only moves the same bytes.

Everything is measured interleaved in one process: repeat r runs ours, the stream loop and torch's
chain one after the other, so that a slow moment of the machine hits all three.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from poise import _C
from poise.memory import Ledger

LR, BETA1, BETA2, EPS, DECAY, MAX_NORM = 1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
BLOCK = 1_000_000  # elements of one of torch's parameters in the 50M case
ALIGNMENT = 256  # ParamTable::kAlignment


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call over interleaved repeats, after one round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            elapsed = _time(call)
            if repeat > 0:
                seconds[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _best(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The better of one and two threads, for each call by itself."""
    before = torch.get_num_threads()
    best = {name: float("inf") for name in calls}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, value in _medians(calls, repeats).items():
                best[name] = min(best[name], value)
    finally:
        torch.set_num_threads(before)
    return best


class _Ours:
    """One flat with its moments; `ranges` are the parameters' [begin, end) in it."""

    def __init__(self, ranges: list[tuple[int, int]], numel: int, low: bool) -> None:
        with Ledger():  # whose allocator an engine's flats come from: it asks for large pages
            self._fill(ranges, numel, low)
        self.step = 0

    def _fill(self, ranges: list[tuple[int, int]], numel: int, low: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        master, gradient = torch.zeros(numel), torch.zeros(numel)
        for begin, end in ranges:
            master[begin:end].normal_(generator=generator)
            gradient[begin:end].normal_(generator=generator).mul_(1e-3)
        self.master, self.gradient = master, gradient
        self.low = torch.zeros(numel, dtype=torch.bfloat16) if low else None
        self.flats = _C.OptimizerFlats(
            master, gradient, torch.zeros(numel), torch.zeros(numel), self.low
        )
        self.ranges = torch.tensor(ranges, dtype=torch.int64)

    def update(self) -> None:
        self.step += 1
        _C.optimizer_stage(
            self.flats, self.ranges, self.step, LR, BETA1, BETA2, EPS, DECAY, MAX_NORM
        )

    def stream(self) -> None:
        _C.stream_pass(self.flats)


class _Torch:
    """What a training loop calls for the same work: unscale and check, clip, fused AdamW, copy."""

    def __init__(self, sizes: list[int], low: bool, unscale: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [
            torch.nn.Parameter(torch.empty(n).normal_(generator=generator)) for n in sizes
        ]
        for parameter in self.parameters:
            parameter.grad = torch.empty(parameter.numel()).normal_(generator=generator).mul_(1e-3)
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.parameters, LR, (BETA1, BETA2), EPS, DECAY, fused=True
        )
        self.low = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes] if low else []
        self.unscale = unscale
        self.found_inf, self.inverse_scale = torch.zeros(1), torch.ones(1)

    def update(self) -> None:
        if self.unscale:
            torch._amp_foreach_non_finite_check_and_unscale_(
                self.gradients, self.found_inf, self.inverse_scale
            )
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM, foreach=True)
        self.optimizer.step()
        if self.low:
            with torch.no_grad():
                torch._foreach_copy_(self.low, self.parameters)


def _ranges(sizes: list[int], alignment: int) -> tuple[list[tuple[int, int]], int]:
    ranges, offset = [], 0
    for size in sizes:
        ranges.append((offset, offset + size))
        offset += (size + alignment - 1) // alignment * alignment
    return ranges, offset


def optimizer_stage(numel: int = 50_000_000, repeats: int = 7) -> Iterator[dict]:
    """Unscale + finite + norm + clip + AdamW + bf16 copy of `numel` parameters."""
    sizes = [BLOCK] * (numel // BLOCK)
    ranges, padded = _ranges(sizes, ALIGNMENT)
    ours, theirs = _Ours(ranges, padded, low=True), _Torch(sizes, low=True, unscale=True)
    best = _best({"ours": ours.update, "stream": ours.stream, "torch": theirs.update}, repeats)
    detail = {f"{name}_ms": round(1e3 * seconds, 2) for name, seconds in best.items()}
    yield {
        "figure": "optimizer_stage_vs_torch",
        "value": round(best["torch"] / best["ours"], 3),
        "aim": 1.6,
        "better": "higher",
        **detail,
    }
    yield {
        "figure": "optimizer_stage_vs_stream",
        "value": round(best["ours"] / best["stream"], 3),
        "aim": 1.3,
        "better": "lower",
        **detail,
    }


def tiny_params(count: int = 2000, repeats: int = 15) -> Iterator[dict]:
    """Clip and AdamW of `count` parameters of 16 to 256 elements."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(16, 257, (count,), generator=generator).tolist()
    ranges, padded = _ranges(sizes, ALIGNMENT)
    ours, theirs = _Ours(ranges, padded, low=False), _Torch(sizes, low=False, unscale=False)
    best = _best({"ours": ours.update, "torch": theirs.update}, repeats)
    yield {
        "figure": "tiny_params_vs_torch",
        "value": round(best["torch"] / best["ours"], 3),
        "aim": 3.0,
        "better": "higher",
        **{f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in best.items()},
    }
