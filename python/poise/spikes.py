"""Warns of a loss or a gradient norm that stands out of those of the last updates."""

from __future__ import annotations

import math
from typing import Any

WATCHED = ("loss", "grad_norm")
RECENT = 64  # updates that a value is compared with
LEAST = 16  # of them before anything is said
THRESHOLD = 6.0  # standard deviations
STEADY = 0.05  # of the mean: what a course without noise may move within


class Spikes:
    """Of one run; a resumed one goes on from what it kept."""

    def __init__(self) -> None:
        self._recent: dict[str, list[float]] = {name: [] for name in WATCHED}

    def look(self, step: int, values: dict[str, float]) -> list[str]:
        """A sentence for each value of this update that is a spike.

        A value that is not finite is the status's to tell and is left out of the comparison. A spike
        itself counts among the next ones' last updates, so that a new level is soon no news.

        Args:
          step: number of the update.
          values: by the names of WATCHED.
        """
        found = []
        for name in WATCHED:
            value, recent = values[name], self._recent[name]
            if not math.isfinite(value):
                continue
            if text := _spike(value, recent):
                found.append(f"update {step}: {name} {value:.4g} is {text}")
            recent.append(value)
            del recent[:-RECENT]
        return found

    def kept(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self._recent.items()}

    def go_on(self, kept: dict[str, Any]) -> None:
        self._recent = {name: list(kept.get(name, ())) for name in WATCHED}


def _spike(value: float, recent: list[float]) -> str:
    if len(recent) < LEAST:
        return ""
    mean = sum(recent) / len(recent)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in recent) / len(recent))
    spread = max(deviation, STEADY * abs(mean))
    if spread == 0 or value - mean <= THRESHOLD * spread:
        return ""
    return (
        f"{(value - mean) / spread:.1f} standard deviations above the mean {mean:.4g} of the last "
        f"{len(recent)} updates"
    )
