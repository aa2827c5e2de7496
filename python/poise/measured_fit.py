"""What a recomputation policy holds and takes at any micro-batch: lines between a few that are run for real."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from poise import trace
from poise._C import Group
from poise.engine import Engine
from poise.trace import Link, Trace, joined

REPEATS = 2  # of a run whose time counts
LARGE_SHARE = 0.9  # of the budget that the largest trial may be said to hold


class Fit:
    """What a policy holds and takes at any micro-batch: lines between measured ones."""

    def __init__(self, points: list[tuple[int, Trace]]) -> None:
        self._points = points
        self.held = points[0][1].held

    @classmethod
    def of(
        cls,
        engine: Engine,
        policy: dict[str, Any],
        sizes: Sequence[int],
        batch_of: Callable[[int], Any],
        loss_fn: Callable[[Any], Any],
        budget: int | None = None,
    ) -> Fit | None:
        """None where not even the smallest fits.

        The two smallest are run, and the largest that these say fits well into the budget: seconds
        and peaks bend between small and large ones. It takes about as long as the update it stands for.
        """
        engine.set_checkpointing(policy)
        points: list[tuple[int, Trace]] = []
        for size in sizes[:2]:
            try:
                points.append((size, _timed(engine, batch_of(size), loss_fn)))
            except torch.OutOfMemoryError:  # on all ranks
                break
        if not points:
            return None
        fit = cls(_alike(engine, points))
        if budget is None or len(points) < 2 or len(sizes) < 3:
            return fit
        held = sum(fit.held.values())
        room = LARGE_SHARE * budget
        expected = [float(held + peak_of(fit.links(size))) for size in sizes[2:]]
        peaks = agreed(engine.group, expected)
        fitting = [size for size, peak in zip(sizes[2:], peaks, strict=True) if peak <= room]
        if not fitting:
            return fit
        with contextlib.suppress(torch.OutOfMemoryError):
            points.append((fitting[-1], _timed(engine, batch_of(fitting[-1]), loss_fn)))
        return cls(_alike(engine, points))

    def links(self, size: int) -> list[Link]:
        low, high = self._around(size)
        return [
            Link(
                *(
                    self._line(size, low, high, getattr(a, field.name), getattr(b, field.name))
                    for field in dataclasses.fields(Link)
                )
            )
            for a, b in zip(low[1].links, high[1].links, strict=True)
        ]

    def seconds(self, size: int) -> float:
        low, high = self._around(size)
        if high[0] == low[0]:
            return low[1].seconds * size / low[0]
        # Noise must not make a part of the work free.
        each = max(0.0, (high[1].seconds - low[1].seconds) / (high[0] - low[0]))
        return max(low[1].seconds + each * (size - low[0]), size * high[1].seconds / high[0] * 0.5)

    @property
    def known(self) -> int:
        """The largest micro-batch that is known of: one point alone is no line."""
        return self._points[0][0] if len(self._points) == 1 else 1 << 62

    def _around(self, size: int) -> tuple[tuple[int, Trace], tuple[int, Trace]]:
        """The two points that the line through `size` goes through."""
        above = next((i for i, point in enumerate(self._points) if point[0] >= size), None)
        last = len(self._points) - 1
        high = last if above is None else max(above, min(1, last))
        return self._points[max(0, high - 1)], self._points[high]

    @staticmethod
    def _line(
        size: int, low: tuple[int, Trace], high: tuple[int, Trace], at_low: int, at_high: int
    ) -> int:
        if high[0] == low[0]:
            return at_low
        return at_low + (at_high - at_low) * (size - low[0]) // (high[0] - low[0])


def peak_of(links: list[Link]) -> int:
    """The highest moment of forward and backward."""
    kept = top = 0
    for link in links:
        top = max(top, kept + link.forward_peak)
        kept += link.saved
    for link in reversed(links):
        kept -= link.saved
        top = max(top, kept + link.backward_peak)
    return top


def agreed(group: Group, values: list[float]) -> list[float]:
    """The largest of all ranks, value by value, so that all decide the same."""
    if group.size == 1:
        return values
    rows = [json.loads(row) for row in group.all_gather_text(json.dumps(values), "the balance")]
    return [max(column) for column in zip(*rows, strict=True)]


def alike(group: Group, traces: list[Trace]) -> list[Trace]:
    """All of them as one link where one of them is, on one of the ranks: a model that leaves out a block now and
    then (LayerDrop) does not run them one after the other each time."""
    fewest = min(len(one.links) for one in traces)
    if not agreed(group, [float(fewest == 1)])[0]:
        return traces
    return [dataclasses.replace(one, links=[joined(one.links)]) for one in traces]


def _alike(engine: Engine, points: list[tuple[int, Trace]]) -> list[tuple[int, Trace]]:
    sizes, traces = zip(*points, strict=True)
    return list(zip(sizes, alike(engine.group, list(traces)), strict=True))


def _timed(engine: Engine, batch: Any, loss_fn: Callable[[Any], Any]) -> Trace:
    """The bytes of the last of a few runs and the seconds of the fastest, the slowest rank's."""
    traces = [trace.measure(engine, batch, loss_fn) for _ in range(REPEATS)]
    slowest = agreed(engine.group, [min(t.seconds for t in traces)])[0]
    return dataclasses.replace(traces[-1], seconds=slowest)
