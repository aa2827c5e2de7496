"""What offload costs: the update of states on the host against torch and against moving its bytes,
and the file store against plain reads and writes of the same disk.

The disk figures move as many bytes as are asked for, through a file in the folder `POISE_BENCH_DISK`
(default: the current one); on a disk that is slower than memory they measure the disk.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

import poise
from poise import _C
from poise.bench import optimizer

BLOCK = 1 << 20
DEPTH = 8
LAYERS = 10
ACCUMULATION = 3  # of which the first gradients are not added to anything


def _disk() -> str:
    return os.environ.get("POISE_BENCH_DISK", ".")


class _Updates:
    """Windows of an engine whose gradients cost nearly nothing, so that the update is what is timed."""

    def __init__(self, numel: int, offload: dict) -> None:
        each = numel // LAYERS
        generator = torch.Generator().manual_seed(1)
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(each).normal_(0, 0.1, generator=generator).bfloat16())
            for _ in range(LAYERS)
        )
        self.gradient = torch.empty(each).normal_(generator=generator).mul_(1e-3).bfloat16()
        self.engine = poise.Engine(
            self.model,
            {
                "batch": {"accumulation": ACCUMULATION},
                "precision": {"dtype": "bf16", "parameters": "bf16"},
                "optimizer": {"lr": optimizer.LR, "weight_decay": optimizer.DECAY},
                "offload": offload,
            },
        )

    def seconds(self, repeats: int) -> float:
        """Median time of an update whose norm is a pass of its own; the first one warms up."""
        return statistics.median([self.apart() for _ in range(repeats + 1)][1:])

    def apart(self) -> float:
        """Seconds of norm, clip, AdamW and the 16-bit copy, each a pass or part of one of the update.

        The window closes before its time, so that the norm is not made with the last gradients.
        """
        self._backward()
        return self.engine.step(last=True).update_seconds

    def folded(self) -> float:
        """Seconds of the same work in a whole window, where the norm is made while the last gradients
        are added up: those of the update, and what that adding takes longer than the one before."""
        took = [self._backward() for _ in range(ACCUMULATION)]
        return self.engine.step().update_seconds + took[-1] - took[-2]

    def _backward(self) -> float:
        loss = sum(_Fixed.apply(p, self.gradient) for p in self.model)
        begin = time.perf_counter()
        self.engine.backward(loss, tokens=1)
        return time.perf_counter() - begin


class _Fixed(torch.autograd.Function):
    """A scalar with a given gradient."""

    @staticmethod
    def forward(context, parameter, gradient):
        context.gradient = gradient
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(context, _):
        return context.gradient, None


def _deepspeed(sizes: list[int]) -> Callable[[], None] | None:
    """The same work by DeepSpeed's CPU Adam, where it is installed and builds."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except Exception:  # not installed, or not usable here
        return None
    theirs = optimizer._Torch(sizes, low=True, unscale=True)
    theirs.optimizer = DeepSpeedCPUAdam(
        theirs.parameters, optimizer.LR, betas=(optimizer.BETA1, optimizer.BETA2)
    )
    return theirs.update


def offload_update(numel: int = 100_000_000, repeats: int = 5) -> Iterator[dict]:
    """Unscale, norm, clip, AdamW and bf16 copy of states in memory of the host, interleaved with torch's
    and with a loop that only moves the bytes. Of the two ways in which an update meets its norm
    `offload_update_vs_peers` is the usual one; `apart_ms` is that where it is read for the norm alone."""
    sizes = [numel // LAYERS] * LAYERS
    updates = _Updates(numel, {"optimizer": "host"})
    stream = optimizer._Ours([(0, numel)], numel, low=True).stream
    peers = {"torch": optimizer._Torch(sizes, low=True, unscale=True).update}
    deepspeed = _deepspeed(sizes)
    if deepspeed is not None:
        peers["deepspeed"] = deepspeed
    ways: dict[str, Callable[[], float]] = {"ours": updates.folded, "apart": updates.apart}
    for name, call in {"stream": stream, **peers}.items():
        ways[name] = lambda call=call: optimizer._time(call)
    rounds = [{name: way() for name, way in ways.items()} for _ in range(repeats + 1)][1:]
    seconds = {name: statistics.median(one[name] for one in rounds) for name in ways}
    detail = {f"{name}_ms": round(1e3 * value, 1) for name, value in seconds.items()}
    fastest = min(seconds[name] for name in peers)
    yield {
        "figure": "offload_update_vs_peers",
        "value": round(fastest / seconds["ours"], 3),
        "aim": 1.5,
        "better": "higher",
        **detail,
    }
    yield {
        "figure": "offload_update_vs_stream",
        "value": round(seconds["apart"] / seconds["stream"], 3),
        "aim": 1.3,
        "better": "lower",
        **detail,
    }


class _Plain:
    """Blocks of a named file by as many threads as there are blocks in flight."""

    def __init__(self, folder: str, size: int, direct: bool) -> None:
        self.path = os.path.join(folder, "plain")
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.file = os.open(self.path, flags, 0o600)
        os.posix_fallocate(self.file, 0, size)
        self.direct, self.size = direct, size
        self.pool = ThreadPoolExecutor(DEPTH)
        self.memory = [mmap.mmap(-1, BLOCK) for _ in range(DEPTH)]  # page-aligned
        for memory in self.memory:
            memory.write(os.urandom(BLOCK))

    def _each(self, move: Callable[[int, list, int], int]) -> None:
        def lane(number: int) -> None:
            for offset in range(number * BLOCK, self.size, DEPTH * BLOCK):
                if move(self.file, [self.memory[number]], offset) != BLOCK:
                    raise poise.Error(f"[bench] a short transfer at offset {offset}")

        list(self.pool.map(lane, range(DEPTH)))

    def write(self) -> None:
        self._each(os.pwritev)
        if not self.direct:
            os.fsync(self.file)

    def read(self) -> None:
        if not self.direct:  # not from memory
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)
        self._each(os.preadv)

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.file)


def _page_aligned(numel: int) -> torch.Tensor:
    """As the staging memory of an update is."""
    return torch.frombuffer(mmap.mmap(-1, 4 * numel), dtype=torch.float32)


class _Store:
    """The same bytes through the file store, tile by tile."""

    TILE = 8 * BLOCK // 4  # elements

    def __init__(self, folder: str, size: int) -> None:
        self.store = _C.FileStore(folder, DEPTH, BLOCK)
        self.span = self.store.reserve(size // 4, torch.float32)
        self.tiles = [_page_aligned(self.TILE).normal_() for _ in range(3)]
        self.begins = range(0, size // 4, self.TILE)

    def _each(self, move: Callable) -> None:
        moving: list = []
        for number, begin in enumerate(self.begins):
            if len(moving) == len(self.tiles):
                moving.pop(0).wait()
            moving.append(move(begin, self.tiles[number % len(self.tiles)]))
        for transfer in moving:
            transfer.wait()

    def write(self) -> None:
        self._each(self.span.put)

    def read(self) -> None:
        self._each(self.span.fetch)


def file_store(size: int = 512 << 20, repeats: int = 3) -> Iterator[dict]:
    """Rates of the file store over plain O_DIRECT and over the page cache with fsync."""
    size = size // (8 * BLOCK) * (8 * BLOCK)
    with tempfile.TemporaryDirectory(dir=_disk()) as folder, contextlib.ExitStack() as stack:
        ours = _Store(folder, size)
        sides = {"ours": ours}
        try:
            sides["raw"] = _Plain(folder, size, direct=True)
        except OSError:
            sides["raw"] = None  # this file system has no O_DIRECT
        os.makedirs(os.path.join(folder, "cached"))
        sides["buffered"] = _Plain(os.path.join(folder, "cached"), size, direct=False)
        for side in (sides["raw"], sides["buffered"]):
            if side is not None:
                stack.callback(side.close)
        calls = {
            f"{name}_{way}": getattr(side, way)
            for name, side in sides.items()
            if side is not None
            for way in ("write", "read")
        }
        seconds = optimizer._medians(calls, repeats)
    detail = {f"{name}_mb_per_s": round(size / value / 1e6) for name, value in seconds.items()}
    for figure, other, aim in (
        ("file_store_vs_raw", "raw", 0.9),
        ("file_store_vs_buffered", "buffered", 1.0),
    ):
        if sides[other] is None:
            continue
        ratios = [seconds[f"{other}_{w}"] / seconds[f"ours_{w}"] for w in ("write", "read")]
        yield {
            "figure": figure,
            "value": round(min(ratios), 3),  # the worse of the two ways
            "aim": aim,
            "better": "higher",
            **detail,
        }


def file_overlap(numel: int = 21_000_000, repeats: int = 3) -> Iterator[dict]:
    """An update whose states live in a file, over the largest of its three parts alone.

    Each of ten layers has a whole number of tiles of 8 blocks, at least one.
    """
    tile = _Store.TILE
    layer = numel // LAYERS // tile * tile
    if layer == 0:
        raise poise.Error(f"[bench] {numel} elements are too few; give {LAYERS * tile} or more")
    numel = LAYERS * layer
    size = 12 * numel
    with tempfile.TemporaryDirectory(dir=_disk()) as folder:
        store = _Store(folder, size)
        parts = optimizer._medians({"write": store.write, "read": store.read}, repeats)
        del store
        gc.collect()
        parts["update"] = _Updates(numel, {"optimizer": "host"}).seconds(repeats)
        gc.collect()
        offload = {"optimizer": "file", "directory": folder, "staging_bytes": "256MiB"}
        whole = _Updates(numel, offload).seconds(repeats)
    yield {
        "figure": "file_overlap",
        "value": round(whole / max(parts.values()), 3),
        "aim": 1.3,
        "better": "lower",
        "whole_ms": round(1e3 * whole, 1),
        # One disk does its reads and writes one after the other, whoever overlaps them.
        "over_reads_and_writes": round(whole / max(parts["read"] + parts["write"], 1e-9), 3),
        **{f"{name}_ms": round(1e3 * value, 1) for name, value in parts.items()},
    }
