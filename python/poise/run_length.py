"""How long a run is: updates of an epoch and of the whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from poise._C import Error
from poise.training_arguments import TrainingArguments


@dataclasses.dataclass(frozen=True)
class RunLength:
    """A window never spans two epochs, so the last one of an epoch may be shorter.

    Attributes:
      updates: of the whole run.
      updates_per_epoch: None where the length of the data is not known; after a ramp.
      epochs: passes begun.
      batches_per_epoch: micro-batches, None where not known.
      window_of: micro-batches of the update after so many, of all ranks that share an epoch's.
      ramp: updates after which windows are all of one length.
    """

    updates: int
    updates_per_epoch: int | None
    epochs: int
    batches_per_epoch: int | None
    window_of: Callable[[int], int]
    ramp: int = 0

    @classmethod
    def of(cls, batches: int | None, args: TrainingArguments, ranks: int = 1) -> RunLength:
        """`batches`: micro-batches of one pass, None where not known; `ranks` that share them."""

        def window_of(update: int) -> int:
            return args.accumulation_at(update) * ranks

        if batches is None:
            if args.max_steps < 1:
                raise Error("[trainer] the training data has no length; set max_steps")
            return cls(args.max_steps, None, 1, None, window_of, args.accumulation_ramp_updates)
        if batches == 0:
            raise Error(
                "[trainer] the training data makes no batch: it is empty, or shorter than one "
                "batch with dataloader_drop_last"
            )
        ramp = args.accumulation_ramp_updates
        per_epoch = math.ceil(batches / window_of(ramp))
        # Updates of the epochs that a ramp makes longer; all later ones are alike.
        longer: list[int] = []
        while sum(longer) < ramp:
            longer.append(_updates_of(batches, sum(longer), window_of))

        def updates_in(epochs: int) -> int:
            return sum(longer[:epochs]) + per_epoch * max(0, epochs - len(longer))

        if args.max_steps > 0:
            updates = args.max_steps
        else:
            whole = math.floor(args.num_train_epochs)
            part = args.num_train_epochs - whole
            updates = updates_in(whole)
            updates += math.ceil(part * (updates_in(whole + 1) - updates))
        if updates < 1:
            raise Error(
                f"[trainer] num_train_epochs is {args.num_train_epochs}; give more than 0, or "
                "max_steps"
            )
        epochs = next((n for n in range(len(longer) + 1) if updates_in(n) >= updates), None)
        if epochs is None:
            epochs = len(longer) + math.ceil((updates - sum(longer)) / per_epoch)
        return cls(updates, per_epoch, epochs, batches, window_of, ramp)

    def part_of_epoch(self, updates: int, first: int = 0) -> float:
        """What so many updates of an epoch, which began after `first` ones, take of its micro-batches,
        in [0, 1]."""
        if self.batches_per_epoch is None:
            return 0.0
        return min(self.batches_of(updates, first), self.batches_per_epoch) / self.batches_per_epoch

    def batches_of(self, updates: int, first: int = 0) -> int:
        """Micro-batches of so many full windows after `first` ones."""
        ramped = range(first, max(first, min(first + updates, self.ramp)))
        full = (updates - len(ramped)) * self.window_of(self.ramp)
        return sum(self.window_of(update) for update in ramped) + full


def _updates_of(batches: int, first: int, window_of: Callable[[int], int]) -> int:
    """Of one pass that begins after `first` updates."""
    update = first
    while batches > 0:
        batches -= window_of(update)
        update += 1
    return update - first
