"""Traces without memory, against the peaks that a GPU's allocator reported for the same modules.

Liger-Kernel's benchmarks run forward and backward again and again and keep the graph. Its figures are of
the whole GPU: two of cuBLAS' workspaces are in them wherever matrices are multiplied (one for the thread
of forward, one for autograd's), and beside the plain loss head the weight of the one it is compared with.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from poise.fake_trace import Counter
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CASES = Path(__file__).resolve().parents[2] / "tests/plan/cases/kernel_peaks.csv"
BF16 = torch.bfloat16
WIDTH, FFN, VOCABULARY = 4096, 11008, 128256
WORKSPACES = 2 * 8.125  # MiB
ROUNDING = 0.05  # MiB: the allocator's, in steps of 512 bytes


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, x = x.dtype, x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(given)


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, FFN, bias=False, dtype=BF16) for _ in range(2))
        self.down = nn.Linear(FFN, WIDTH, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def rms_norm(width: int) -> Callable[[], None]:
    norm, x, gradient = RmsNorm(width), *(torch.empty(2048, width, dtype=BF16) for _ in range(2))
    x.requires_grad_()
    return lambda: norm(x).backward(gradient, retain_graph=True)


def swiglu(tokens: int) -> Callable[[], None]:
    mlp, x = GatedMlp(), torch.empty(4, tokens, WIDTH, dtype=BF16, requires_grad=True)

    def run() -> None:
        y = mlp(x)
        y.backward(torch.empty_like(y), retain_graph=True)

    return run


def fused_linear_cross_entropy(rows: int) -> Callable[[], None]:
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=BF16)
    other = torch.empty_like(head.weight)
    x = torch.empty(rows, WIDTH, dtype=BF16, requires_grad=True)
    targets = torch.empty(rows, dtype=torch.long)

    def run(held: torch.Tensor = other) -> None:
        nn.functional.cross_entropy(head(x), targets).backward()

    return run


KERNELS = {
    "rms_norm": (rms_norm, 0.0),
    "swiglu": (swiglu, WORKSPACES),
    "fused_linear_cross_entropy": (fused_linear_cross_entropy, WORKSPACES),
}


def rows() -> list[tuple[str, int, float]]:
    with CASES.open(newline="") as file:
        return [
            (r["kernel"], int(r["size"]), float(r["measured_mib"])) for r in csv.DictReader(file)
        ]


@pytest.mark.parametrize(("kernel", "size", "measured"), rows())
def test_a_trace_counts_what_the_gpu_held(kernel, size, measured):
    make, besides = KERNELS[kernel]
    counter = Counter()
    with FakeTensorMode(), counter:
        run = make(size)
        for _ in range(2):  # gradients are there from the second time on
            counter.read()
            run()
        _, peak = counter.read()
    assert peak / 2**20 + besides == pytest.approx(measured, abs=ROUNDING * max(1, size / 4096))
