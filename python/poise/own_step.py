"""A micro-batch of a Trainer that goes through training_step, a subclass's own perhaps: one forward and one
backward, which is self.accelerator.backward(loss) or loss.backward()."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from poise import plain_backward
from poise._C import Error
from poise.engine import Engine
from poise.loss import Count, as_loss

logger = logging.getLogger("poise")


class OwnStep:
    """Runs training_step for one micro-batch after the other, and takes their losses.

    A loss is the mean over its micro-batch: the engine makes the window's mean of it, by counts. Steps
    written for transformers divide by args.gradient_accumulation_steps, as they must there; that
    division is taken back.

    Args:
      name: of the Trainer's class.

    Attributes:
      engine: of the micro-batch that is going on; None: none is.
    """

    room, takes_unmarked = "trainer", True  # of plain_backward

    def __init__(self, name: str) -> None:
        self._name, self._is_overridden = name, False
        self.engine: Engine | None = None
        self._forward = contextlib.ExitStack()
        self._lengths: set[int] = set()
        self._window = 1
        self._count: Count = None
        self._done = False
        self._division_was_told = False

    def begin_window(self, micro_batches: int, accumulation: int, is_overridden: bool) -> None:
        """So many micro-batches come; a full window has `accumulation` of them.

        Args:
          is_overridden: whether training_step is a subclass's own: whatever that runs up to its backward is
            a forward, in the run's precision.
        """
        self._window, self._lengths = micro_batches, {micro_batches, accumulation}
        self._is_overridden = is_overridden

    def run(
        self,
        engine: Engine,
        training_step: Callable[[], torch.Tensor],
        count: Count,
    ) -> torch.Tensor:
        """What training_step returns.

        Args:
          count: labels of the micro-batch that its loss is a mean over.
        """
        self.engine, self._count, self._done = engine, count, False
        try:
            with self._forward, plain_backward.taken_by(self):
                if self._is_overridden:
                    self._forward.enter_context(engine.forward_scope())
                result = training_step()
        finally:
            self.engine = None
        if not self._done:
            raise Error(
                f"[trainer] {self._name}.training_step() ran no backward of the model's loss; let it call "
                "self.accelerator.backward(loss) or loss.backward(), once for each micro-batch"
            )
        return result

    def leave_forward(self) -> None:
        """Ends the forward that run() began."""
        self._forward.close()

    def backward(self, loss: Any) -> None:
        """The micro-batch's one backward.

        Args:
          loss: a mean over its labels, or what poise.Loss allows.
        """
        if self.engine is None:
            raise Error(
                "[trainer] accelerator.backward() outside of training_step(): no run goes on"
            )
        if self._done:
            raise Error(
                "[trainer] training_step() ran backward a second time for one micro-batch: the engine would "
                "count its labels twice; add the losses up and run backward of the sum"
            )
        self._forward.close()
        self._done = True
        loss = as_loss(loss)
        if loss.kind == "mean" and loss.count is None:
            loss.value, loss.count = self._undivided(loss.value), self._count
        self.engine.backward(loss)

    def notice_division(self, loss: torch.Tensor) -> None:
        """backward() does."""

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch that is going on is the last one of its window."""
        before = 0 if self.engine is None else self.engine.micro_batches - self._done
        return before + 1 >= self._window

    def _undivided(self, loss: torch.Tensor) -> torch.Tensor:
        divisor = plain_backward.divisor_of(loss)
        if divisor is None or divisor == 1 or divisor not in self._lengths:
            return loss
        if not self._division_was_told:
            logger.warning(
                "[trainer] training_step() divides its loss by %d, as many micro-batches as a window has: "
                "that is taken back, since the update makes the window's mean",
                divisor,
            )
            self._division_was_told = True
        return loss * divisor
