"""Which values of a batch are labels: by name in a dictionary, the last one of a tuple."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

LABELS = ("labels", "label", "label_ids")
POSITIONS = ("start_positions", "end_positions")  # of question answering


def names_of(model: nn.Module) -> tuple[str, ...]:
    """Of forward's arguments those that are labels, by the rule of transformers' Trainer."""
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)  # what peft wraps
    model = base() if base else model
    answers = "QuestionAnswering" in type(model).__name__
    return tuple(
        name
        for name in inspect.signature(model.forward).parameters
        if "label" in name or (answers and name in POSITIONS)
    )


def labels_in(batch: Any, names: Sequence[str] = LABELS) -> Any:
    """A tensor, several as a tuple, None: there are none.

    Args:
      batch: of a dictionary those of `names` that it has, where it has none of them the first of
        LABELS; of a tuple its last tensor.
      names: in order.
    """
    if not isinstance(batch, Mapping):
        last = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        return last if isinstance(last, torch.Tensor) else None
    found = tuple(batch[name] for name in names if isinstance(batch.get(name), torch.Tensor))
    if not found or tuple(names) == LABELS:
        usual = (batch[name] for name in LABELS if isinstance(batch.get(name), torch.Tensor))
        return next(usual, None)
    return found[0] if len(found) == 1 else found


def counted_in(batch: Any, names: Sequence[str] = LABELS) -> torch.Tensor | None:
    """The one whose entries a loss is a mean over: of several the one called labels, or the first."""
    found = labels_in(batch, names)
    if not isinstance(found, tuple):
        return found
    usual = labels_in(batch)
    return found[0] if usual is None else usual


def without_labels(batch: Any, names: Sequence[str] = LABELS) -> Any:
    """The batch as forward gets it where it is to make no loss."""
    if isinstance(batch, Mapping):
        dropped = {*names, *LABELS}
        return {name: value for name, value in batch.items() if name not in dropped}
    return batch[:-1] if labels_in(batch) is not None else batch
