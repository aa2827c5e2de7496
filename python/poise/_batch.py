"""What a batch tells and takes: its samples, how many targets its labels hold, more samples, floating inputs
in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from poise._C import Error


def leaves_of(batch: Any) -> list[Any]:
    """As torch's tree_leaves, which looks into no mappings but dictionaries: of transformers' BatchEncoding, too."""
    leaves = []
    for leaf in tree_leaves(batch):
        leaves += leaves_of(dict(leaf)) if isinstance(leaf, Mapping) else [leaf]
    return leaves


def mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """As torch's tree_map, likewise."""

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Mapping):
            return function(leaf)
        return of_entries(lambda value: mapped(function, value), leaf)

    return tree_map(of_leaf, batch)


def of_entries(function: Callable[[Any], Any], values: Any) -> Any:
    """A mapping, list or tuple of what the function makes of its entries. It keeps its type, where that is made of
    entries."""
    if isinstance(values, Mapping):
        return _of_type(type(values), {name: function(value) for name, value in values.items()})
    entries = [function(value) for value in values]
    if hasattr(values, "_fields"):
        return type(values)(*entries)
    return _of_type(type(values), tuple(entries) if isinstance(values, tuple) else entries)


def _of_type(kind: type, made: Any) -> Any:
    try:
        return kind(made)
    except TypeError:  # one that is not made of entries
        return made


def samples_in(batch: Any) -> int:
    """Rows of a batch's first tensor."""
    first = next((t for t in leaves_of(batch) if isinstance(t, torch.Tensor) and t.dim() > 0), None)
    return 1 if first is None else first.shape[0]


def repeated(sample: Any, size: int) -> Any:
    """A batch of so many times the one sample that the given batch has, in memory of its own: a model may write
    into what it gets. What has no first dimension of one sample stays as it is.
    """

    def repeat(value: Any) -> Any:
        per_sample = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == 1
        return value.repeat(size, *[1] * (value.dim() - 1)) if per_sample else value

    return mapped(repeat, sample)


def count_targets(
    labels: torch.Tensor, ignore_index: int = -100, *, shifted: bool = False
) -> torch.Tensor:
    """How many targets a loss counts: a 0-dim int64 tensor on the labels' device, without a sync.

    Args:
        labels: Class indices, any shape.
        ignore_index: Value that is not counted.
        shifted: True where the model compares position t with label t + 1 (transformers' language
            models do): the first label of every row is then no target.
    """
    counted = labels[..., 1:] if shifted else labels
    return (counted != ignore_index).sum()


def cast_inputs(batch: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in `dtype`, in any nesting of dicts, lists and tuples; all else unchanged.

    Integers are never cast, and neither is what a dict holds as "labels": what the loss is measured
    against keeps its digits.
    """
    if not dtype.is_floating_point:
        raise Error(f"[data] inputs cast to {dtype}; give a floating type")
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        cast = {k: v if k == "labels" else cast_inputs(v, dtype) for k, v in batch.items()}
        return _of_type(type(batch), cast)
    if isinstance(batch, (list, tuple)):
        return of_entries(lambda item: cast_inputs(item, dtype), batch)
    return batch
