"""What the demo has to show, checked and said in words; what it did not show is a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from poise.demo import agreement
from poise.demo.outcome import MIB, STATES, Outcome, fp32_curves


@dataclasses.dataclass
class Findings:
    """Sentences for the terminal and the report."""

    words: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)  # none: the demo has succeeded


def findings(outcomes: Sequence[Outcome]) -> Findings:
    found = Findings()
    for outcome in outcomes:
        if outcome.error and outcome.row.kind != "misfit":
            found.problems.append(f"{outcome.row.title} failed: {outcome.error}")
    _curves(outcomes, found)
    _budget(outcomes, found)
    _memory(outcomes, found)
    _half(outcomes, found)
    _sharding(outcomes, found)
    _offload(outcomes, found)
    return found


def _curves(outcomes: Sequence[Outcome], found: Findings) -> None:
    curves = [entry for entry in fp32_curves(outcomes) if not entry.error]
    if not curves:
        found.problems.append("No fp32 row came to its end, so no curves were compared.")
        return
    first, others = curves[0], {entry.row.title: entry.losses for entry in curves[1:]}
    comparisons = agreement.compare_all(first.losses, others)
    words = agreement.in_words(first.row.title, comparisons)
    agree = bool(comparisons) and all(entry.agrees for entry in comparisons)
    (found.words if agree else found.problems).extend(words)


def _budget(outcomes: Sequence[Outcome], found: Findings) -> None:
    for entry in outcomes:
        if not entry.row.has_budget:
            continue
        budget = f"{entry.budget_bytes / MIB:.1f} MiB"
        if entry.row.kind != "misfit":
            if not entry.error and entry.peak_bytes:
                found.words.append(
                    f"{entry.row.title}: fits {budget}, peak {entry.peak_bytes / MIB:.1f} MiB."
                )
        elif entry.error is None:
            found.problems.append(f"{entry.row.title}: it ran, but should not fit {budget}.")
        elif "memory" not in entry.error.lower():
            found.problems.append(f"{entry.row.title}: failed, but not for memory: {entry.error}")
        else:
            found.words.append(f"{entry.row.title}: does not fit {budget}: {entry.error}")


def _memory(outcomes: Sequence[Outcome], found: Findings) -> None:
    measured = [e for e in fp32_curves(outcomes) if e.accounts and e.row.ranks == 1]
    if len(measured) < 2:
        return
    plain, least = measured[0], min(measured, key=lambda entry: entry.peak_bytes)
    activations = [entry.accounts.get("activations", 0) / MIB for entry in (plain, least)]
    found.words.append(
        f"Peak memory went from {plain.peak_bytes / MIB:.1f} MiB ({plain.row.title}) to "
        f"{least.peak_bytes / MIB:.1f} MiB ({least.row.title}); activations alone from "
        f"{activations[0]:.1f} to {activations[1]:.1f} MiB."
    )


def _states(entry: Outcome) -> float:
    """MiB that a rank holds whatever the batch."""
    return sum(entry.accounts.get(name, 0) for name in STATES) / MIB


def _sharding(outcomes: Sequence[Outcome], found: Findings) -> None:
    measured = [entry for entry in fp32_curves(outcomes) if entry.accounts and not entry.error]
    whole = next((_states(entry) for entry in measured if entry.row.ranks == 1), None)
    sharded = [entry for entry in measured if entry.row.ranks > 1]
    if whole is None or not sharded:
        return
    each = ", ".join(f"{_states(entry):.1f} MiB at stage {entry.row.stage}" for entry in sharded)
    sentence = (
        f"Parameters, gradients and optimizer states take {whole:.1f} MiB on one rank and, on each "
        f"of {sharded[0].row.ranks}, {each}."
    )
    held = [whole, *(_states(entry) for entry in sharded)]  # in order of stages
    falls = all(after < before for before, after in zip(held, held[1:], strict=False))
    (found.words if falls else found.problems).append(sentence)


def _offload(outcomes: Sequence[Outcome], found: Findings) -> None:
    """States that do not fit a budget, trained inside it."""
    for entry in outcomes:
        if not entry.row.states_over_budget or entry.error:
            continue
        states = _states(outcomes[0])
        sentence = (
            f"{entry.row.title}: parameters, gradients and optimizer states of {states:.1f} MiB "
            f"trained in {entry.budget_bytes / MIB:.1f} MiB of the device, peak "
            f"{(entry.peak_bytes or 0) / MIB:.1f}; {entry.host_bytes / MIB:.1f} MiB of the host and "
            f"{entry.file_bytes / MIB:.1f} MiB of a file took the rest."
        )
        fits = 0 < (entry.peak_bytes or 0) <= entry.budget_bytes < states * MIB
        (found.words if fits else found.problems).append(sentence)


def _half(outcomes: Sequence[Outcome], found: Findings) -> None:
    for entry in outcomes:
        if entry.row.kind != "half" or entry.error or not entry.losses:
            continue
        text = f"{entry.row.title}: {len(entry.losses)} updates, last loss {entry.losses[-1]:.4f}"
        if entry.loss_scales:
            text += (
                f", loss scale {entry.loss_scales[0]:,.0f} at the first, "
                f"{entry.loss_scales[-1]:,.0f} at the last, {entry.skipped} skipped"
            )
        found.words.append(text + ".")
