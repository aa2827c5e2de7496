"""Where no balance fits a budget: the floor, the nearest budget that works, and what else would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from poise import _C, fake_trace
from poise._C import Error, format_bytes

if TYPE_CHECKING:
    from poise.balance import Candidate
    from poise.forecast import Forecast
    from poise.placement import Placement

ROOM = 1.01  # over a floor that follows from measured micro-batches
ROOM_UNMEASURED = 1.06  # over one that is planned alone: what operations take inside is not traced


class NothingFits(Error):
    """No balance fits.

    Attributes:
      smallest: the balance of least memory; None where not even that is known.
      floor: bytes of a rank that it takes; 0: not known.
      dominated_by: the account that is most of it.
    """

    def __init__(
        self, message: str, smallest: Candidate | None, floor: int = 0, dominated_by: str = ""
    ) -> None:
        super().__init__(message)
        self.smallest, self.floor, self.dominated_by = smallest, floor, dominated_by


def explained(
    error: NothingFits | torch.OutOfMemoryError,
    forecast: Forecast | None,
    places: Sequence[Placement],
    *,
    warns: bool,
) -> NothingFits:
    """The same error, which now says the floor, what most of it is, the nearest budget that works and the
    levers.

    Args:
      error: what was tried, and how it did not fit.
      forecast: of the run; None: there is none.
      places: that states may lie in.
      warns: on_misfit is "warn" already.
    """
    if not isinstance(error, NothingFits):
        error = NothingFits(
            f"[plan] no balance was found within memory_budget: {str(error).splitlines()[0]}", None
        )
    if forecast is None:
        return error
    parts, budget, room = [str(error)], forecast.task.budget, ROOM
    floor, dominated_by = error.floor, error.dominated_by
    try:
        answers = [(forecast.answer(place), place) for place in places]
        answer, place = min(answers, key=lambda one: one[0].floor)
        if floor == 0:
            room = ROOM_UNMEASURED
            floor = max(answer.floor, budget)  # what was given did not do, whatever is planned
            peaks = answer.front[-1].at_peak  # of the plan of least memory
            dominated_by = answer.dominated_by or max(peaks, key=peaks.__getitem__)
        helps = _C.plan_what_helps(forecast.job(place))
    except fake_trace.Untraceable as why:
        helps = f"what else would help is not known: {why}"
    if floor > 0:
        parts.append(
            f"the least that a global batch of {forecast.task.global_batch} takes is "
            f"{format_bytes(floor)}, most of it {dominated_by}; the nearest budget that works is "
            f"{_C.budget_text(int(room * floor))}"
        )
    parts.append(helps)
    if not forecast.may_split:
        parts.append(
            "the micro-batch stayed as it is, since the loss may not be split as far as is known: "
            "separable_loss=True of a Trainer releases it"
        )
    if not warns:
        parts.append("or begin all the same: on_misfit warn")
    return NothingFits("; ".join(parts), error.smallest, floor, dominated_by)
