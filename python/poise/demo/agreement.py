"""Whether loss curves agree: what the demo promises, checked and said in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

EARLY_UPDATES = 5
EARLY_BOUND = 1e-5  # relative; the order of additions differs, nothing else may
LATE_BOUND = 1e-2  # rounding grows from update to update


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far a curve is from the reference."""

    name: str
    early: float  # largest relative difference of the losses of updates 1 to 5
    late: float  # after
    problem: str | None  # None: it agrees

    @property
    def agrees(self) -> bool:
        return self.problem is None


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Per update; NaN and infinities are as far away as can be."""
    differences = []
    for loss, expected in zip(losses, reference, strict=False):
        difference = abs(loss - expected) / abs(expected) if expected else math.inf
        differences.append(difference if math.isfinite(difference) else math.inf)
    return differences


def compare(name: str, losses: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Holds a curve against the reference, which must be as long."""
    differences = relative_differences(losses, reference)
    early = max(differences[:EARLY_UPDATES], default=0.0)
    late = max(differences[EARLY_UPDATES:], default=0.0)
    return Comparison(name, early, late, _problem(losses, reference, differences))


def _problem(losses, reference, differences) -> str | None:
    if len(losses) != len(reference) or not losses:
        return f"it has {len(losses)} updates, the reference {len(reference)}"
    for update, difference in enumerate(differences, start=1):
        bound = EARLY_BOUND if update <= EARLY_UPDATES else LATE_BOUND
        if difference > bound:
            return (
                f"at update {update} its loss is {losses[update - 1]:.7g}, the reference's "
                f"{reference[update - 1]:.7g}: relative difference {difference:.1e}, "
                f"allowed {bound:.0e}"
            )
    return None


def compare_all(
    reference: Sequence[float], others: Mapping[str, Sequence[float]]
) -> list[Comparison]:
    return [compare(name, losses, reference) for name, losses in others.items()]


def in_words(reference_name: str, comparisons: Sequence[Comparison]) -> list[str]:
    """Sentences for the terminal and the report."""
    if not comparisons:
        return ["No other fp32 row ran, so no curves were compared."]
    wrong = [entry for entry in comparisons if not entry.agrees]
    if wrong:
        return [
            f"The fp32 loss curves DO NOT agree with {reference_name}: "
            f"{len(wrong)} of {len(comparisons)} are off.",
            *(f"{entry.name}: {entry.problem}." for entry in wrong),
        ]
    early = max(comparisons, key=lambda entry: entry.early)
    late = max(comparisons, key=lambda entry: entry.late)
    return [
        f"The fp32 loss curves agree: all {len(comparisons)} give the losses of {reference_name}.",
        f"Largest relative difference over updates 1 to {EARLY_UPDATES}: {early.early:.1e} "
        f"({early.name}), allowed {EARLY_BOUND:.0e}; "
        f"after: {late.late:.1e} ({late.name}), allowed {LATE_BOUND:.0e}.",
    ]
