"""The planner against what happened: bytes and seconds of many balances of four models."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from poise import Engine, balance
from poise.balance import Candidate
from poise.models.byte_gpt import ByteGPT

SAMPLES = 16  # of an update: micro-batches of 1, 2, 4, 8 and 16
REPEATS = 3
PLENTY = 1 << 40  # bytes: everything fits
BUDGETS = 5  # of a model, from the smallest that any candidate held to the largest


class Subject(NamedTuple):
    """A model, what makes a micro-batch of so many samples, and its loss with its count."""

    model: nn.Module
    batch_of: Callable[[int], Any]
    loss: Callable[[Any], Any]


def _byte_gpt() -> Subject:
    model = ByteGPT(layers=4, width=96, heads=4, sequence_length=96)
    row = torch.randint(256, (1, 97), generator=torch.Generator().manual_seed(0))

    def loss(batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model.loss(batch[:, :-1], batch[:, 1:]), batch[:, 1:].numel()

    return Subject(model, lambda size: row.repeat(size, 1), loss)


class _RotaryBlock(nn.Module):
    """As in a Llama: RMS norms, rotary positions, grouped keys and values, a gated MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.head // 2
        angle = torch.outer(torch.arange(x.shape[2]), 10000.0 ** (-torch.arange(half) / half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        h = self.norm(x)
        q = self.q(h).view(rows, length, self.heads, self.head).transpose(1, 2)
        k = self.k(h).view(rows, length, self.kv_heads, self.head).transpose(1, 2)
        v = self.v(h).view(rows, length, self.kv_heads, self.head).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (self._rotated(k), v))
        mixed = nn.functional.scaled_dot_product_attention(self._rotated(q), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        h = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class _LlamaStyle(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_RotaryBlock(width, 4, 2, 3 * width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _llama_style() -> Subject:
    model = _LlamaStyle(vocabulary=1000, width=96, layers=5)
    row = torch.randint(1000, (1, 65), generator=torch.Generator().manual_seed(1))

    def loss(batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), targets.numel()

    return Subject(model, lambda size: row.repeat(size, 1), loss)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))


def _conv_net() -> Subject:
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.Sequential(*(_Residual(24) for _ in range(4))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )
    image = torch.randn((1, 3, 32, 32), generator=torch.Generator().manual_seed(2))

    def loss(batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        labels = torch.zeros(len(batch), dtype=torch.long)
        return nn.functional.cross_entropy(model(batch), labels), len(batch)

    return Subject(model, lambda size: image.repeat(size, 1, 1, 1), loss)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def _mlp() -> Subject:
    model = nn.Sequential(
        nn.Linear(32, 256), nn.Sequential(*(_Layer(256) for _ in range(6))), nn.Linear(256, 8)
    )
    rows = torch.randn((64, 32), generator=torch.Generator().manual_seed(3))

    def loss(batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().mean(), len(batch)

    return Subject(model, lambda size: rows.repeat(size, 1), loss)


SUBJECTS = {
    "byte_gpt": _byte_gpt,
    "llama_style": _llama_style,
    "conv_net": _conv_net,
    "mlp": _mlp,
}


def _measured(subject: Subject, engine: Engine, candidate: Candidate) -> tuple[int, float]:
    """Peak bytes and median seconds of forward and backward of an update run that way."""
    engine.set_checkpointing(candidate.checkpointing)
    window = [subject.batch_of(candidate.micro_batch)] * candidate.accumulation
    results = [engine.step(window, subject.loss) for _ in range(REPEATS + 1)][1:]
    seconds = statistics.median(r.forward_seconds + r.backward_seconds for r in results)
    return max(r.peak_bytes for r in results), seconds


class _Tried(NamedTuple):
    """A model, its engine, and its candidates with what they were measured to hold and take."""

    subject: Subject
    engine: Engine
    runs: list[tuple[Candidate, int, float]]


def _runs() -> Iterator[tuple[str, _Tried]]:
    """Every micro-batch with no, half and all blocks recomputed; predictions come first."""
    for name, make in SUBJECTS.items():
        torch.manual_seed(0)
        subject = make()
        engine = Engine(subject.model, {"batch": {"accumulation": SAMPLES}})
        subject.model.train()
        candidates = balance.predict(engine, subject.batch_of, subject.loss, SAMPLES, PLENTY)
        blocks = len(engine.blocks)
        runs = [
            (candidate, *_measured(subject, engine, candidate))
            for candidate in candidates
            if candidate.recomputed in (0, blocks // 2, blocks)
        ]
        yield name, _Tried(subject, engine, runs)


def plan() -> Iterator[dict]:
    """Errors of bytes and seconds over all runs; time of the chosen one over the best measured."""
    tried = dict(_runs())
    peaks = {n: [abs(peak / c.peak - 1) for c, peak, _ in t.runs] for n, t in tried.items()}
    times = [abs(seconds / c.seconds - 1) for t in tried.values() for c, _, seconds in t.runs]
    every = [error for errors in peaks.values() for error in errors]
    shared = {"better": "lower", "plans": len(every)}
    yield {
        "figure": "plan_peak_median",
        "value": round(statistics.median(every), 4),
        "aim": 0.03,
        **shared,
    }
    yield {
        "figure": "plan_peak_worst",
        "value": round(max(every), 4),
        "aim": 0.05,
        **shared,
        "by_model": {name: round(max(errors), 4) for name, errors in peaks.items()},
    }
    yield {
        "figure": "plan_time_median",
        "value": round(statistics.median(times), 4),
        "aim": 0.10,
        **shared,
    }
    regrets = {name: round(_regret(one), 4) for name, one in tried.items()}
    yield {
        "figure": "plan_regret",
        "value": max(regrets.values()),
        "aim": 1.05,
        **shared,
        "by_model": regrets,
    }


def _regret(tried: _Tried) -> float:
    """The worst, over budgets, of the chosen plan's seconds over the best measured one that fits.

    The search is that of a Trainer, at each budget anew; what it chooses is measured like the others.
    """
    worst = 1.0
    known = {(c.micro_batch, c.recomputed): seconds for c, _, seconds in tried.runs}
    peaks = sorted(peak for _, peak, _ in tried.runs)
    for budget in peaks[:: max(1, len(peaks) // BUDGETS)]:
        found = balance.find(
            tried.engine,
            tried.subject.batch_of,
            tried.subject.loss,
            samples=SAMPLES,
            budget=budget,
        ).chosen
        key = (found.micro_batch, found.recomputed)
        if key not in known:
            known[key] = _measured(tried.subject, tried.engine, found)[1]
        best = min(seconds for _, peak, seconds in tried.runs if peak <= budget)
        worst = max(worst, known[key] / min(best, known[key]))
    return worst


def plan_search() -> Iterator[dict]:
    """The time of the command beyond the start of the program."""
    searches = {
        "plan_seconds_32": (1.0, ["--model", "llama-3-8b", "--gpus", "8xH100-80GB"]),
        "plan_seconds_1024": (5.0, ["--model", "llama-3.1-405b", "--gpus", "1024xH100-80GB"]),
    }
    for figure, (aim, arguments) in searches.items():
        command = [sys.executable, "-m", "poise", "plan", *arguments, "--json"]
        command += ["--seq", "8192", "--global-batch", "8192"]
        seconds = min(_seconds_of(command) for _ in range(REPEATS))
        version = [sys.executable, "-m", "poise", "--version"]
        start = min(_seconds_of(version) for _ in range(REPEATS))
        yield {
            "figure": figure,
            "value": round(max(0.0, seconds - start), 3),
            "aim": aim,
            "better": "lower",
            "program_start_s": round(start, 3),
        }


def _seconds_of(command: list[str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: the plan does not fit
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return time.perf_counter() - begin
