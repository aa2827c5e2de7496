"""What a model says of a dataset, as numpy arrays, and metrics of it; names as in transformers."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from poise import ranks
from poise._C import Error, Group
from poise.eval_share import Uncounted, in_order
from poise.evaluation import MeanLoss, Scope, eval_mode
from poise.loss import Loss

PADDING = -100  # of arrays that differ in length, as in transformers
# A cache of the model, no prediction. Models name further ones in their config.
NO_PREDICTIONS = ("loss", "past_key_values", "mems")


@dataclasses.dataclass
class EvalPrediction:
    """What compute_metrics gets; unpacks into (predictions, label_ids) too.

    Attributes:
      predictions: array, or a tuple of arrays where the model returns several.
      label_ids: the same of the labels.
    """

    predictions: Any
    label_ids: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predictions, self.label_ids))

    def __getitem__(self, index: int) -> Any:
        return (self.predictions, self.label_ids)[index]


class PredictionOutput(NamedTuple):
    """Arrays over the whole dataset (label_ids None without labels), and metrics by name."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


def predict(
    model: nn.Module,
    batches: Iterable[Any],
    call: Callable[[Any], tuple[Loss | None, Any, Any]],
    scope: Scope,
    prefix: str,
    preprocess: Callable[[Any, Any], Any] | None = None,
    compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
    group: Group | None = None,
    ignored: tuple[str, ...] = (),
) -> PredictionOutput:
    """Runs the batches without gradients, in eval mode.

    Args:
      model: whose modes are switched.
      batches: what to run; of several ranks each has its share (poise.eval_share).
      call: gives (loss or None, outputs, labels or None) of a batch.
      scope: makes the context of one forward (precision).
      prefix: of the metrics' names.
      preprocess: (predictions, labels) of a batch -> what is kept of its predictions.
      compute_metrics: of the whole, where there are losses or labels.
      group: the ranks that share the batches; all get the whole.
      ignored: outputs that are no predictions, besides the loss and caches.
    """
    mean = MeanLoss()
    predictions, label_ids = _Arrays(), _Arrays()
    with eval_mode(model):
        for batch in batches:
            counts = not isinstance(batch, Uncounted)
            with scope():
                loss, outputs, labels = call(batch if counts else batch.batch)
            if not counts:
                continue
            if loss is not None:
                mean.add(loss)
            logits = predictions_in(model, outputs, ignored)
            if preprocess is not None and logits is not None:
                logits = preprocess(logits, labels)
            predictions.add(logits)
            label_ids.add(labels)
    if group is not None and group.size > 1:
        _join_ranks(group, mean, predictions, label_ids)
    has_loss = bool(mean.rows)
    metrics = mean.metrics(prefix) if has_loss else {f"{prefix}_runtime": mean.seconds()}
    whole = EvalPrediction(predictions.joined(), label_ids.joined())
    if compute_metrics is not None and (whole.label_ids is not None or has_loss):
        metrics.update(_prefixed(_computed(compute_metrics, whole), prefix))
    return PredictionOutput(whole.predictions, whole.label_ids, metrics)


def _join_ranks(group: Group, mean: MeanLoss, *arrays: _Arrays) -> None:
    """What every rank has of its batches becomes what all have of all."""
    mine = pickle.dumps([mean.rows, *(entry.parts for entry in arrays)])
    of_ranks = [pickle.loads(data) for data in ranks.all_bytes(group, mine, "predictions")]
    mean.rows, *parts = (in_order(list(lists)) for lists in zip(*of_ranks, strict=True))
    for entry, whole in zip(arrays, parts, strict=True):
        entry.parts = whole


def predictions_in(model: nn.Module, outputs: Any, also_ignored: tuple[str, ...] = ()) -> Any:
    """The model's outputs without its loss and caches: one of them alone, several as a tuple."""
    if isinstance(outputs, torch.Tensor):
        return outputs if outputs.dim() > 0 else None  # a scalar is the loss
    config = getattr(model, "config", None)
    ignored = {
        *NO_PREDICTIONS,
        *also_ignored,
        *(getattr(config, "keys_to_ignore_at_inference", None) or ()),
    }
    if isinstance(outputs, Mapping):
        found = [value for name, value in outputs.items() if name not in ignored]
    elif isinstance(outputs, (tuple, list)):
        found = [v for v in outputs if not (isinstance(v, torch.Tensor) and v.dim() == 0)]
    else:
        fields = getattr(outputs, "__dict__", {})
        found = [value for name, value in fields.items() if name not in ignored]
    found = [value for value in found if _is_nested_tensor(value)]
    return (found[0] if len(found) == 1 else tuple(found)) if found else None


def _is_nested_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) > 0 and all(_is_nested_tensor(entry) for entry in value)
    return isinstance(value, torch.Tensor)


def _computed(compute_metrics: Callable, whole: EvalPrediction) -> Mapping[str, float]:
    if whole.predictions is None:
        raise Error(
            "[trainer] compute_metrics needs predictions, but the model returned only its loss; "
            "return (loss, logits) or a dictionary with both"
        )
    if whole.label_ids is None:
        raise Error(
            "[trainer] compute_metrics needs labels, which the samples do not have; call them "
            "labels, or put them last in a tuple"
        )
    metrics = compute_metrics(whole)
    if not isinstance(metrics, Mapping):
        raise Error(
            f"[trainer] compute_metrics returned {type(metrics).__name__}; return a dictionary of "
            "numbers by name"
        )
    return metrics


def _prefixed(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    named = {
        name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
        for name, value in metrics.items()
    }
    return {k: v.item() if _is_number(v) else v for k, v in named.items()}


def _is_number(value: Any) -> bool:
    """Of numpy or torch: one, or an array of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (numpy.generic, numpy.ndarray)) and value.size == 1


class _Arrays:
    """Tensors, or tuples of them, of many batches, joined along the first dimension."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def add(self, value: Any) -> None:
        if value is not None:
            self.parts.append(_to_numpy(value))

    def joined(self) -> Any:
        return _join(self.parts) if self.parts else None


def _to_numpy(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_to_numpy(entry) for entry in value)
    if not isinstance(value, torch.Tensor):
        return numpy.asarray(value)
    value = value.detach()
    value = value.float() if value.dtype == torch.bfloat16 else value  # numpy has no bf16
    return torch.atleast_1d(value).cpu().numpy()


def _join(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_join(list(entries)) for entries in zip(*parts, strict=True))
    if parts[0].ndim < 2 or len({part.shape[1] for part in parts}) == 1:
        return numpy.concatenate(parts)
    # Batches padded to their own longest sample.
    longest = max(part.shape[1] for part in parts)
    shape = (sum(len(part) for part in parts), longest, *parts[0].shape[2:])
    whole = numpy.full(shape, PADDING, dtype=parts[0].dtype)
    row = 0
    for part in parts:
        whole[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return whole
