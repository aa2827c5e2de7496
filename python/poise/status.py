"""What became of an update."""

from __future__ import annotations

import enum


class Status(str, enum.Enum):
    """`StepResult.status`; compares equal to its name."""

    APPLIED = "applied"
    OVERFLOW = "overflow"  # fp16 gradients had an inf or NaN: only the loss scale changed
    NONFINITE_LOSS = "nonfinite_loss"  # nothing changed
    NONFINITE_GRADIENT = "nonfinite_gradient"  # nothing changed
    EMPTY = "empty"  # no counted token in the window: nothing changed

    def __str__(self) -> str:
        return self.value
