"""Saving and loading against a loop that only writes, and against torch.save and torch.load."""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from poise import Engine
from poise.bench.optimizer import _time as timed

PARAMETERS, BLOCK = 90_000_000, 1_000_000  # masters and two moments: 1.08 GB
TILE = 4 << 20
WINDOW = 8  # micro-batches of the update beside an asynchronous save
SHM = Path("/dev/shm")
WRITERS = 2


class _Model(torch.nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = torch.nn.ParameterList(
            torch.randn(min(BLOCK, numel), generator=generator)
            for _ in range(max(1, numel // BLOCK))
        )

    def loss(self, _: object) -> torch.Tensor:
        return sum(block.sum() for block in self.blocks)


class _Ours:
    def __init__(self, numel: int, asynchronous: bool = False) -> None:
        self.model = _Model(numel)
        config = {"optimizer": {"type": "adamw"}, "state": {"asynchronous": asynchronous}}
        if asynchronous:
            config["state"]["staging_bytes"] = "2GiB"
        self.engine = Engine(self.model, config)
        self.engine.step([None], self.model.loss)  # moments that are not zero

    def bytes(self) -> int:
        return 12 * sum(block.numel() for block in self.model.blocks)


class _Torch:
    """The same state in a dictionary of tensors, as people save it."""

    def __init__(self, numel: int) -> None:
        self.model = _Model(numel)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.model.loss(None).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, path: Path) -> None:
        """With fsync, so that it is as safe."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _write_raw(path: Path, size: int) -> None:
    """The same bytes in tiles past the page cache (where the file system can), from one tile."""
    direct = os.O_DIRECT
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct, 0o666)
    except OSError:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    with mmap.mmap(-1, TILE) as tile:  # aligned
        tile.write(os.urandom(TILE))
        try:
            for _ in range(-(-size // TILE)):
                os.write(file, tile)
            os.fsync(file)
        finally:
            os.close(file)


def _write_plainly(folder: Path, blocks: list[memoryview]) -> None:
    """Calls of write() alone, by threads that have a file each: what the system's copy takes."""

    def write(thread: int) -> None:
        file = os.open(folder / f"plain{thread}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for block in blocks[thread::WRITERS]:
                left = block
                while left:
                    left = left[os.write(file, left) :]
        finally:
            os.close(file)

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, range(WRITERS)))


def _rounds(folder: Path, numel: int, repeats: int, in_memory: bool) -> dict[str, float]:
    """Median seconds of each way, interleaved; every save is of a name of its own, and removed."""
    ours, theirs = _Ours(numel), _Torch(numel)
    calls = {
        "raw": lambda: _write_raw(folder / "raw", ours.bytes()),
        "save": lambda: ours.engine.save(folder / "saves", name="one"),
        "torch_save": lambda: theirs.save(folder / "state.pt"),
    }
    if in_memory:
        # As many bytes as the masters and both moments, and not in the caches either.
        blocks = [memoryview(b.detach().numpy()).cast("B") for b in ours.model.blocks] * 3
        calls["write"] = lambda: _write_plainly(folder, blocks)
    seconds: dict[str, list[float]] = {name: [] for name in (*calls, "load", "torch_load")}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            shutil.rmtree(folder / "saves", ignore_errors=True)
            for file in ("raw", "state.pt", *(f"plain{i}" for i in range(WRITERS))):
                (folder / file).unlink(missing_ok=True)
            os.sync()  # what the one before left is not this one's to write
            elapsed = timed(call)
            if repeat > 0:
                seconds[name].append(elapsed)
            if name == "save":
                load = lambda: ours.engine.load(folder / "saves")  # noqa: E731
                _timed_load(seconds, "load", load, repeat, folder)
            if name == "torch_save":
                load = lambda: theirs.load(folder / "state.pt")  # noqa: E731
                _timed_load(seconds, "torch_load", load, repeat, folder)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _timed_load(seconds: dict, name: str, call: object, repeat: int, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():  # out of the page cache, where only one of them has been
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    elapsed = timed(call)
    if repeat > 0:
        seconds[name].append(elapsed)


def _figure(
    name: str, value: float, aim: float, better: str, seconds: dict, **more: object
) -> dict:
    return {
        "figure": name,
        "value": round(value, 3),
        "aim": aim,
        "better": better,
        **{f"{key}_ms": round(1e3 * one, 3) for key, one in seconds.items()},
        **more,
    }


def save_and_load(numel: int = PARAMETERS, repeats: int = 3, folder: str = ".") -> Iterator[dict]:
    """Rates over a raw loop and torch's on the disk of this folder; in memory over torch's, and over what
    copies the bytes there without checksum or names."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="poise-bench-") as name:
        s = _rounds(Path(name), numel, repeats, in_memory=False)
    yield _figure("save_vs_raw", s["raw"] / s["save"], 0.9, "higher", s)
    yield _figure("save_vs_torch", s["torch_save"] / s["save"], 1.0, "higher", s)
    yield _figure("load_vs_torch", s["torch_load"] / s["load"], 1.0, "higher", s)
    if SHM.is_dir():
        with tempfile.TemporaryDirectory(dir=SHM, prefix="poise-bench-") as name:
            s = _rounds(Path(name), numel, repeats, in_memory=True)
        yield _figure("save_vs_torch_tmpfs", s["torch_save"] / s["save"], 3.0, "higher", s)
        yield _figure("save_vs_write_tmpfs", s["write"] / s["save"], 0.9, "higher", s)


def async_stall(numel: int = PARAMETERS, repeats: int = 3, folder: str = ".") -> Iterator[dict]:
    """How long an asynchronous save holds the training up, over how long a save takes.

    What it holds up: the call, and the next update, which waits for what the save has not read yet.
    How much longer the whole step takes while the save is written is printed beside it.
    """
    waits, behind = _Ours(numel), _Ours(numel, asynchronous=True)
    window = [None] * WINDOW
    seconds: dict[str, list[float]] = {
        name: [] for name in ("save", "call", "update", "update_in_save", "step", "step_in_save")
    }
    with tempfile.TemporaryDirectory(dir=folder, prefix="poise-bench-") as name:
        for repeat in range(repeats + 1):
            shutil.rmtree(Path(name), ignore_errors=True)
            Path(name).mkdir()
            os.sync()
            took = {"save": timed(lambda: waits.engine.save(Path(name) / "waits", name="one"))}
            os.sync()
            alone = behind.engine.step(window, behind.model.loss)
            folder_behind = Path(name) / "behind"
            took["call"] = timed(lambda f=folder_behind: behind.engine.save(f, name="one"))
            busy = behind.engine.step(window, behind.model.loss)
            behind.engine.finish_save()
            took |= {"update": alone.update_seconds, "update_in_save": busy.update_seconds}
            took |= {"step": alone.total_seconds, "step_in_save": busy.total_seconds}
            if repeat > 0:  # the first one makes the staging memory
                for key, value in took.items():
                    seconds[key].append(value)
    s = {key: statistics.median(values) for key, values in seconds.items()}
    stall = s["call"] + max(0.0, s["update_in_save"] - s["update"])
    yield _figure("async_stall", stall / s["save"], 0.1, "lower", s, micro_batches=WINDOW)
