"""One update of a run, with what a person wants to be told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from poise import banner, model_view, nonfinite
from poise._C import StepResult
from poise.engine import Engine
from poise.loss import Loss


def step(
    engine: Engine,
    window: list[Any],
    loss_fn: Callable[[Any], Loss],
    first: bool,
    note: Callable[[str], None],
    last_save: str = "",
    counts: Sequence[float] = (),
    before_each: Callable[[], None] | None = None,
) -> StepResult:
    """The update; one that is stopped over a non-finite loss says where that comes from.

    Args:
      engine: of the run.
      window: its micro-batches.
      loss_fn: the loss of one, with its count.
      first: of the run: then `note` gets a line about the attention kernels that torch chose.
      note: takes a line of text.
      counts: of the window, of a loss with several terms.
      before_each: called before every micro-batch; what it raises drops the window.
      last_save: the path that a run which stops can go on from; empty: there is none.
    """
    probe = banner.AttentionProbe()
    watched = first and not model_view.has_compiled_parts(engine.model)
    with nonfinite.explained(engine, window, loss_fn, last_save):
        run = probe.around(loss_fn) if watched else loss_fn

        def loss(batch: Any) -> Loss:
            if before_each is not None:
                before_each()
            return run(batch)

        result = engine.step(window, loss, counts=counts)
    if line := probe.line():
        note(line)
    return result
