"""What a batch tells and takes: its samples, how many targets its labels hold, more samples, floating inputs
in another dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from poise._C import Error


def samples_in(batch: Any) -> int:
    """Rows of a batch's first tensor."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    first = next((t for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 0), None)
    return 1 if first is None else first.shape[0]


def repeated(sample: Any, size: int) -> Any:
    """A batch of so many times the one sample that the given batch has; no bytes are copied.

    What has no first dimension of one sample stays as it is.
    """

    def repeat(value: Any) -> Any:
        per_sample = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == 1
        return value.expand(size, *value.shape[1:]) if per_sample else value

    return tree_map(repeat, sample)


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
        return type(batch)(cast)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cast_inputs(item, dtype) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(cast_inputs(item, dtype) for item in batch)
    return batch
