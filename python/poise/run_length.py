"""How long a run is: updates of an epoch and of the whole."""

from __future__ import annotations

import dataclasses
import math

from poise._C import Error
from poise.training_arguments import TrainingArguments


@dataclasses.dataclass(frozen=True)
class RunLength:
    """A window never spans two epochs, so the last one of an epoch may be shorter.

    Attributes:
      updates: of the whole run.
      updates_per_epoch: None where the length of the data is not known.
      epochs: passes begun.
      batches_per_epoch: micro-batches, None where not known.
      batches_per_window: micro-batches of a whole update, of all ranks that share an epoch's.
    """

    updates: int
    updates_per_epoch: int | None
    epochs: int
    batches_per_epoch: int | None
    batches_per_window: int

    @classmethod
    def of(cls, batches: int | None, args: TrainingArguments, ranks: int = 1) -> RunLength:
        """`batches`: micro-batches of one pass, None where not known; `ranks` that share them."""
        if batches is None:
            if args.max_steps < 1:
                raise Error("[trainer] the training data has no length; set max_steps")
            return cls(args.max_steps, None, 1, None, args.accumulation * ranks)
        if batches == 0:
            raise Error(
                "[trainer] the training data makes no batch: it is empty, or shorter than one "
                "batch with dataloader_drop_last"
            )
        per_window = args.accumulation * ranks
        per_epoch = math.ceil(batches / per_window)
        if args.max_steps > 0:
            updates = args.max_steps
        else:
            updates = math.ceil(args.num_train_epochs * per_epoch)
        if updates < 1:
            raise Error(
                f"[trainer] num_train_epochs is {args.num_train_epochs}; give more than 0, or "
                "max_steps"
            )
        return cls(updates, per_epoch, math.ceil(updates / per_epoch), batches, per_window)

    def part_of_epoch(self, updates: int) -> float:
        """What the first so many updates of an epoch take of its micro-batches, in [0, 1]."""
        if self.batches_per_epoch is None:
            return 0.0
        return (
            min(updates * self.batches_per_window, self.batches_per_epoch) / self.batches_per_epoch
        )
