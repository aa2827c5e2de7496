"""Samples become batches as transformers' Trainer makes them: unused keys go, lists become tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from poise._C import Error
from poise.labels import LABELS


def collate_for(
    model: nn.Module,
    collate: Callable | None,
    processing_class: Any,
    remove_unused: bool,
    label_names: Iterable[str] = (),
) -> Callable:
    """Makes a batch of a list of samples.

    Args:
      model: whose forward says which keys of a sample it takes.
      collate: the user's; None: pads with a tokenizer where there is one, else stacks.
      processing_class: a tokenizer or processor, or None.
      remove_unused: whether keys that forward does not take are dropped,
      label_names: but for labels.
    """
    if collate is None:
        collate = usual_for(model, processing_class)
    if not remove_unused:
        return collate
    return WithoutUnused(collate, _names(model), {*LABELS, *label_names})


def usual_for(model: nn.Module, processing_class: Any) -> Callable:
    """Pads with a tokenizer where there is one, else stacks."""
    pads = hasattr(processing_class, "pad")
    return Padded(processing_class) if pads else Stacked(_names(model))


def unused(model: nn.Module, names: Iterable[str], label_names: Iterable[str]) -> list[str]:
    """Of these keys those that forward does not take."""
    taken = _names(model)
    return [] if taken is None else [n for n in names if n not in {*taken, *LABELS, *label_names}]


def _names(model: nn.Module) -> frozenset[str] | None:
    """Of forward's arguments; None: it takes any."""
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)  # what peft wraps
    parameters = inspect.signature((base() if base else model).forward).parameters
    named = {n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return frozenset(named) if named else None


_KNOWN = ("input_ids", "attention_mask", "token_type_ids")  # to a tokenizer's pad()
_PADS = (
    "which make no tensor; give processing_class (a tokenizer) or data_collator, which pads them"
)


class WithoutUnused:
    """Drops the keys of dictionaries that forward does not take, then makes the batch."""

    def __init__(
        self, collate: Callable, names: frozenset[str] | None, labels: set[str] | frozenset[str]
    ) -> None:
        self.collate, self._names, self._labels = collate, names, labels

    def __call__(self, samples: list[Any]) -> Any:
        if self._names is None or not samples or not isinstance(samples[0], Mapping):
            return self.collate(samples)
        wanted = self._names | self._labels
        kept = [{k: v for k, v in sample.items() if k in wanted} for sample in samples]
        if not any(name in self._names for name in kept[0]):
            raise Error(
                f"[trainer] forward takes {', '.join(sorted(self._names))}, and a sample has "
                f"{', '.join(map(str, samples[0]))}: nothing is left; rename the keys, or set "
                "remove_unused_columns to False"
            )
        return self.collate(kept)


class Stacked:
    """Torch's own way, but lists of numbers become tensors, floats are fp32 and a label is called
    labels, as in transformers, unless forward takes it by its own name."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names or frozenset()

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], Mapping):
            return _collated(samples)
        batch = {}
        for name in samples[0]:
            values = [_value(sample, name, samples[0]) for sample in samples]
            batch[self._called(name)] = _stacked(name, values)
        return batch

    def _called(self, name: str) -> str:
        renamed = name in ("label", "label_ids") and name not in self._names
        return "labels" if renamed else name


class Padded:
    """A tokenizer's pad(), as transformers' DataCollatorWithPadding."""

    def __init__(self, processing_class: Any) -> None:
        self._pads = processing_class

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], Mapping):
            return _collated(samples)
        rows = [dict(sample) for sample in samples]
        try:
            batch = dict(self._pads.pad(rows, return_tensors="pt"))
        except ValueError as error:
            # pad() knows the columns of the tokenizer, and no others.
            names = [
                n for n in rows[0] if n not in getattr(self._pads, "model_input_names", _KNOWN)
            ]
            ragged = next((name for name in names if _lengths_of(rows, name)), None)
            if ragged is None:
                raise
            raise Error(
                f"[trainer] '{ragged}' has samples of {_lengths_of(rows, ragged)}, which the "
                f"{type(self._pads).__name__} does not pad; give data_collator one that does (of "
                "transformers DataCollatorForSeq2Seq pads labels, DataCollatorForLanguageModeling "
                "makes them), or drop the column"
            ) from error
        for name in ("label", "label_ids"):
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


def _stacked(name: str, values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, (list, tuple, float)):
        return _collated(values, f"'{name}' has samples")
    try:
        return torch.tensor(values)
    except (TypeError, ValueError):
        if not isinstance(first, (list, tuple)) or not first or not _is_number(first[0]):
            return _collated(values, f"'{name}' has samples")
        lengths = sorted({len(value) for value in values})
        raise Error(
            f"[trainer] '{name}' has samples of {lengths[0]} and of {lengths[-1]} numbers, {_PADS}"
        ) from None


def _collated(values: list[Any], what: str = "there are samples") -> Any:
    """Torch's default_collate; what makes no tensor together is said."""
    try:
        return default_collate(values)
    except (RuntimeError, TypeError, ValueError) as error:
        if unlike := _unlike(values):
            raise Error(f"[trainer] {what} of {unlike}, {_PADS}") from error
        raise


def _unlike(values: list[Any]) -> str:
    """Two shapes or kinds among them that are not the same; of tuples, of their first such entry."""
    if all(isinstance(value, (tuple, list)) for value in values):
        return next(
            (text for entries in zip(*values, strict=False) if (text := _unlike(list(entries)))), ""
        )
    described = list(dict.fromkeys(map(_described, values)))
    return " and of ".join(described[:2]) if len(described) > 1 else ""


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"shape {tuple(shape)}"


def _value(sample: Mapping, name: str, first: Mapping) -> Any:
    if name not in sample:
        raise Error(
            f"[trainer] a sample has {', '.join(map(str, sample)) or 'nothing'}, and another of its "
            f"batch {', '.join(map(str, first))}; give all samples the same keys, or data_collator"
        )
    return sample[name]


def _lengths_of(rows: list[dict[str, Any]], name: str) -> str:
    """ "5 and of 7 numbers" where a column's lists differ in length; else empty."""
    lengths = {len(row[name]) for row in rows if hasattr(row.get(name), "__len__")}
    return f"{min(lengths)} and of {max(lengths)} numbers" if len(lengths) > 1 else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
