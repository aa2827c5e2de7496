"""The balance between micro-batch and recomputation, found by measuring the model itself.

Two micro-batches, each with all blocks recomputed and with none, are run for real (poise.trace);
what other micro-batches and other numbers of recomputed blocks hold follows from them, and the
fastest that fits is run once to be sure.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from poise import model_view, trace
from poise._C import format_bytes
from poise.engine import Engine
from poise.measured_fit import Fit, agreed, peak_of
from poise.misfit import NothingFits
from poise.trace import Link

logger = logging.getLogger("poise")

CLOSE = 1.15  # candidates that are no slower than so many times the fastest are run themselves
TRIED = 4  # of them
FAILED_SHARE = 0.97  # after one that ran out, less than so much of what it was predicted to hold


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run an update.

    Attributes:
      micro_batch: samples of one forward and backward.
      accumulation: micro-batches of an update on a rank.
      recomputed: the first so many blocks recompute their activations.
      peak: predicted bytes, everything counted.
      seconds: predicted, of the forwards and backwards of an update.
    """

    micro_batch: int
    accumulation: int
    recomputed: int
    peak: int
    seconds: float

    @property
    def checkpointing(self) -> dict[str, Any]:
        """The section of the configuration."""
        if self.recomputed == 0:
            return {"policy": "none"}
        return {"policy": "first_m", "n": self.recomputed}


@dataclasses.dataclass(frozen=True)
class Balance:
    """What was found.

    Attributes:
      chosen: the fastest candidate that fits.
      accounts: its predicted bytes at the peak, by account.
      measured: bytes at the peak of the one run that made sure, the highest of all ranks; None: nothing fits.
      front: no candidate is both faster and smaller: fastest first.
      candidates: how many there were.
      may_split: whether another micro-batch is the same training.
      fits: the budget, as far as is known.
      foretold: bytes of the chosen one by account at its peak, as said before anything was allocated;
        empty: nothing was.
    """

    chosen: Candidate
    accounts: dict[str, int]
    measured: int | None
    front: list[Candidate]
    candidates: int
    may_split: bool = True
    fits: bool = True
    foretold: dict[str, int] = dataclasses.field(default_factory=dict)


def smallest(engine: Engine, error: NothingFits, *, may_split: bool) -> Balance:
    """That of least memory, for a run that shall begin though nothing fits (on_misfit: warn)."""
    assert error.smallest is not None  # find() knows it
    logger.warning("%s; it begins all the same, since on_misfit is warn", error)
    if error.smallest.recomputed > 0:
        engine.set_checkpointing(error.smallest.checkpointing)
    return Balance(error.smallest, {}, None, [error.smallest], 1, may_split, fits=False)


def find(
    engine: Engine,
    batch_of: Callable[[int], Any],
    loss_fn: Callable[[Any], Any],
    *,
    samples: int,
    budget: int,
    micro_batches: Sequence[int] | None = None,
    recompute: bool = True,
) -> Balance:
    """Finds the fastest split of `samples` that holds at most `budget` bytes; all ranks.

    The engine is left with the blocks recomputed as found; parameters, buffers and random state are
    what they were.

    Args:
      engine: between windows.
      batch_of: makes a micro-batch of so many samples, as large as the data's longest.
      loss_fn: as for Engine.step.
      samples: of one update on this rank.
      budget: bytes of a rank.
      micro_batches: allowed ones; None: all that divide `samples`.
      recompute: whether blocks may be recomputed beyond what the engine does already.

    Raises:
      NothingFits: with the least that would do.
    """
    if name := trace.untold(model_view.device_of(engine.model)):
        logger.warning(
            "[plan] the GPU's allocator %s does not tell what it gives out: every balance is measured as "
            "0 bytes, so that the fastest is taken whatever it holds, and halved where memory runs out; "
            "leave backend out of PYTORCH_CUDA_ALLOC_CONF, or give per_device_train_batch_size",
            name,
        )
    before = engine.checkpointing
    sizes = sorted(micro_batches or _divisors(samples))
    room = _Room.of(engine, budget)
    try:
        fits = _fits(engine, batch_of, loss_fn, sizes, recompute, room.left)
        candidates = _candidates(fits, sizes, samples, len(engine.blocks))
        if not candidates:
            blocks = len(engine.blocks) if len(fits) > 1 else 0
            raise _no_candidate(
                engine, Candidate(sizes[0], samples // sizes[0], blocks, 0, 0.0), room
            )
        return _choose(engine, candidates, fits, room, batch_of, loss_fn)
    except BaseException:
        engine.set_checkpointing(before)
        raise


@dataclasses.dataclass(frozen=True)
class _Room:
    """A budget, and what others hold of it on the GPU of the rank where it is most."""

    budget: int
    others: int

    @classmethod
    def of(cls, engine: Engine, budget: int) -> _Room:
        return cls(budget, int(agreed(engine.group, [float(trace.held_besides(engine))])[0]))

    @property
    def left(self) -> int:
        return max(0, self.budget - self.others)

    def __str__(self) -> str:
        given = f"{format_bytes(self.budget)} that were given"
        if self.others == 0:
            return given
        return f"{given}, of which what is not the engine's holds {format_bytes(self.others)}"


def predict(
    engine: Engine,
    batch_of: Callable[[int], Any],
    loss_fn: Callable[[Any], Any],
    samples: int,
    budget: int,
) -> list[Candidate]:
    """All candidates of find(), none of them tried; the engine is left as it was."""
    before, sizes = engine.checkpointing, _divisors(samples)
    try:
        fits = _fits(engine, batch_of, loss_fn, sizes, True, budget)
        return _candidates(fits, sizes, samples, len(engine.blocks))
    finally:
        engine.set_checkpointing(before)


def _fits(
    engine: Engine,
    batch_of: Callable[[int], Any],
    loss_fn: Callable[[Any], Any],
    sizes: Sequence[int],
    recompute: bool,
    budget: int,
) -> list[Fit | None]:
    """Of every block recomputed and of none; of one alone where there is nothing to choose."""
    policies = [engine.checkpointing]
    blocks = 0 if model_view.is_compiled(engine.model) else len(engine.blocks)  # as one
    if recompute and engine.checkpointing["policy"] == "none" and blocks > 0:
        policies = [{"policy": "first_m", "n": blocks}, {"policy": "none"}]
    return [Fit.of(engine, policy, sizes, batch_of, loss_fn, budget) for policy in policies]


def _candidates(
    fits: list[Fit | None], sizes: Sequence[int], samples: int, blocks: int
) -> list[Candidate]:
    whole, none = fits[0], fits[-1]
    found = []
    for size in sizes:
        for count in range(blocks + 1) if len(fits) > 1 else [0]:
            needed = [whole] if count == blocks else [none] if count == 0 else [whole, none]
            if len(fits) == 1:
                needed = [whole]
            if any(fit is None or size > fit.known for fit in needed):
                continue
            links = _mixed(needed, size, count)
            if links is None:
                continue
            held = sum(needed[0].held.values())
            share = count / blocks if blocks and len(fits) > 1 else 0
            known = none is not None and size <= none.known
            fast = (none if known else needed[-1]).seconds(size)
            slow = max(
                fast, needed[0].seconds(size)
            )  # recomputing is never faster, a clock may say so
            seconds = fast + (slow - fast) * share
            found.append(
                Candidate(
                    size, samples // size, count, held + peak_of(links), seconds * (samples // size)
                )
            )
    return found


def _mixed(fits: list[Fit], size: int, count: int) -> list[Link] | None:
    """The first `count` blocks as in the first run, the others as in the last."""
    first, last = fits[0].links(size), fits[-1].links(size)
    if len(fits) == 1:
        return first
    if len(first) != len(last) or len(first) < 3:
        return None
    return [first[i] if 1 <= i <= count else last[i] for i in range(len(first))]


def _choose(
    engine: Engine,
    candidates: list[Candidate],
    fits: list[Fit | None],
    room: _Room,
    batch_of: Callable[[int], Any],
    loss_fn: Callable[[Any], Any],
) -> Balance:
    peaks = agreed(engine.group, [float(c.peak) for c in candidates])
    candidates = [
        dataclasses.replace(c, peak=int(p)) for c, p in zip(candidates, peaks, strict=True)
    ]
    by_time = sorted(candidates, key=lambda c: (c.seconds, c.recomputed, c.peak))
    held = next((fit.held for fit in fits if fit is not None), {})
    several = len(fits) > 1
    chosen = _fastest(engine, by_time, room.left, batch_of, loss_fn, several=several)
    if chosen is None:
        raise _nothing(candidates, held, room)
    candidate, measured = chosen
    engine.set_checkpointing(candidate.checkpointing if several else engine.checkpointing)
    rest = candidate.peak - sum(held.values())
    accounts = {**held, "activations": held.get("activations", 0) + rest}
    return Balance(candidate, accounts, measured, _front(by_time), len(candidates))


def _fastest(
    engine: Engine,
    by_time: list[Candidate],
    budget: int,
    batch_of: Callable[[int], Any],
    loss_fn: Callable[[Any], Any],
    *,
    several: bool,
) -> tuple[Candidate, int] | None:
    """The fastest that fits and its measured peak; of those that are close all are run.

    Predictions are lines; where two candidates are nearly as fast, running both decides.
    """
    limit = float(budget)
    tried: list[tuple[float, Candidate, int]] = []  # seconds of an update
    for candidate in by_time:
        if tried and (candidate.seconds > CLOSE * tried[0][1].seconds or len(tried) == TRIED):
            break
        if candidate.peak > limit or _alike(candidate, tried):
            continue
        if several:
            engine.set_checkpointing(candidate.checkpointing)
        found = _run(engine, batch_of(candidate.micro_batch), loss_fn)
        if found is None or found[0] > budget:
            limit = min(limit, FAILED_SHARE * candidate.peak)
            continue
        tried.append((found[1] * candidate.accumulation, candidate, found[0]))
    if not tried:
        return None
    _, candidate, measured = min(tried, key=lambda run: run[0])
    return candidate, measured


def _alike(candidate: Candidate, tried: list[tuple[float, Candidate, int]]) -> bool:
    """Whether one of them differs in nothing but more recomputation, which is never faster."""
    return any(
        run.micro_batch == candidate.micro_batch and run.recomputed <= candidate.recomputed
        for _, run, _ in tried
    )


def _run(engine: Engine, batch: Any, loss_fn: Callable[[Any], Any]) -> tuple[int, float] | None:
    """The higher peak and the shorter time of two windows, of all ranks the largest; None where one ran
    out of memory.

    Says so where bytes stay held after a window, which the run to come holds on top of all that was
    predicted.
    """
    runs = []
    try:
        for _ in range(2):
            runs.append(trace.measure(engine, batch, loss_fn))
    except torch.OutOfMemoryError:
        return None
    first, second, last = runs[0].held, runs[1].held, engine.memory()["current"]
    # In both windows: a library's workspace comes once, and a GPU may give a block back late.
    kept = {k: int(last[k]) - was for k, was in first.items() if was < second[k] < last[k]}
    if kept:
        logger.warning(
            "[plan] %s stayed held after two windows that were dropped (%s): something keeps tensors "
            "of a forward, for example outputs in a list or a loss with its graph; keep "
            "x.detach().cpu() or x.item() instead, since no budget covers what grows",
            format_bytes(sum(kept.values())),
            ", ".join(f"{name} {format_bytes(count)}" for name, count in kept.items()),
        )
    peak = max(sum(run.held.values()) + peak_of(run.links) for run in runs)
    highest, slowest = agreed(engine.group, [float(peak), min(run.seconds for run in runs)])
    return int(highest), slowest


def _front(by_time: list[Candidate]) -> list[Candidate]:
    front: list[Candidate] = []
    for candidate in by_time:
        if not front or candidate.peak < front[-1].peak:
            front.append(candidate)
    return front


def _no_candidate(engine: Engine, smallest: Candidate, room: _Room) -> NothingFits:
    """Not even the smallest ran: its peak is not known."""
    blocks = " with every block recomputed" if smallest.recomputed else ""
    held = {name: int(count) for name, count in engine.memory()["current"].items()}
    return NothingFits(
        f"[plan] a micro-batch of {smallest.micro_batch}{blocks} ran out of the {room}; "
        f"{format_bytes(sum(held.values()))} of them are held between micro-batches, most of it "
        f"{max(held, key=held.__getitem__)}",
        smallest,
    )


def _nothing(candidates: list[Candidate], held: dict[str, int], room: _Room) -> NothingFits:
    smallest = min(candidates, key=lambda c: c.peak)
    parts = {**held, "activations": smallest.peak - sum(held.values())}
    dominated_by = max(parts, key=parts.__getitem__)
    tried = ", but ran out of memory when it was tried" if smallest.peak <= room.left else ""
    needed = int(max(smallest.peak, room.left) / FAILED_SHARE) if tried else smallest.peak
    return NothingFits(
        f"[plan] no balance fits the {room}: micro-batches of "
        f"{smallest.micro_batch} with {smallest.recomputed} blocks recomputed take least, "
        f"{format_bytes(smallest.peak)}, most of it {dominated_by}{tried}",
        smallest,
        needed + room.others,
        dominated_by,
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
