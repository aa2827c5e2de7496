"""What of a batch a model could not take: torch's error with the entry's name, type, shape and values.

Looked for after torch's own error, so that a run costs nothing; only types, which the host knows, are looked
at before, and on the way to a GPU numbers, since no process uses it any more that sent it a wrong one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from poise._C import Error
from poise.labels import LABELS, counted_in, labels_in

_TORCHS = (RuntimeError, ValueError, IndexError, TypeError)
_WRONG_TYPE = re.compile(
    r"expected scalar type Long|not implemented for '(Int|Short|Byte|Char)'|Target size"
)
_WRONG_SHAPE = re.compile(
    r"match target batch_size|Target size|must match the size of tensor|target should|"
    r"Expected target size|multi-target not supported"
)
# Of transformers: their loss chooses one of the words or classes that the configuration counts.
_CHOOSING_HEADS = (
    "ForCausalLM",
    "LMHead",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageClassification",
)
# Of torch alone: a list that is too short is an error of somebody's code.
_OUT_OF_RANGE = re.compile(
    r"^index out of range in self$|Target -?\d+ is out of bounds|"
    r"index -?\d+ is out of bounds for dimension"
)


@contextlib.contextmanager
def explained(
    model: nn.Module, batch: Any, names: Sequence[str] = LABELS, room: str = "trainer"
) -> Iterator[None]:
    """Around a forward with its loss.

    Args:
      batch: what the model is called with; names: of its entries that are labels.
      room: what begins the message.

    An exception for which nothing is found stays as it is; so does torch.OutOfMemoryError.
    """
    if reason := _regression_by_integers(model, batch, names):
        raise Error(f"[{room}] {reason}")
    try:
        yield
    except (Error, torch.OutOfMemoryError):
        raise
    except _TORCHS as error:
        if reason := _reason(model, batch, names, str(error)):
            raise Error(f"[{room}] {reason} ({type(error).__name__}: {error})") from error
        raise


@contextlib.contextmanager
def asserts_explained() -> Iterator[None]:
    """Around a run: what a GPU finds out of range it says late, and no value can be read then."""
    try:
        yield
    except RuntimeError as error:
        if "device-side assert" not in str(error):
            raise
        raise Error(
            "[trainer] a kernel of the GPU met a number out of its range, most often a label or a token "
            "number that the model does not know (of labels -100 is left out). Run once with use_cpu=True, "
            "which names it; this process cannot use the GPU any more"
        ) from error


def _regression_by_integers(model: nn.Module, batch: Any, names: Sequence[str]) -> str:
    """Transformers' regression fails in backward only, where nothing says why."""
    config = getattr(getattr(model, "_orig_mod", model), "config", None)
    heads = "SequenceClassification" in type(getattr(model, "_orig_mod", model)).__name__
    kind = getattr(config, "problem_type", None)
    if not heads or (kind or "regression") != "regression":
        return ""
    if kind is None and getattr(config, "num_labels", 0) != 1:
        return ""
    labels = counted_in(batch, names)
    if labels is None or labels.is_floating_point():
        return ""
    return (
        f"labels are {_described(labels)}, and {type(model).__name__} with num_labels 1 makes a regression: "
        "give floats; or num_labels, how many classes there are"
    )


def _reason(model: nn.Module, batch: Any, names: Sequence[str], said: str) -> str:
    labels = counted_in(batch, names)
    if _OUT_OF_RANGE.search(said):
        return _out_of_range(model, batch, names)
    if labels is None:
        return ""
    if _WRONG_TYPE.search(said) and labels.dtype != torch.int64:
        return (
            f"labels are {_described(labels)}: a model that chooses among classes or words takes their "
            "numbers as torch.int64; let the dataset or collator give integers, or call .long()"
        )
    if _WRONG_SHAPE.search(said):
        others = [f"{name} {tuple(v.shape)}" for name, v in _inputs(batch, names)]
        beside = f" beside {', '.join(others)}" if others else ""
        return (
            f"labels are {_described(labels)}{beside}, which the model's loss cannot compare; give one "
            "label for each token, or for each sample, as the model's head has it"
        )
    return ""


class Numbers:
    """Looks at a batch on its way to a GPU, which a number out of range would end for the process: of a
    model of transformers its tokens, and the labels that it makes its loss of."""

    def __init__(self, model: nn.Module, names: Sequence[str], *, makes_loss: bool) -> None:
        plain = getattr(model, "_orig_mod", model)
        self._model, self._names = model, names
        embedding = None
        with contextlib.suppress(AttributeError, NotImplementedError):  # of models without words
            embedding = plain.get_input_embeddings()
        # What a model has, whatever its configuration says: rows may have been added.
        self._words = getattr(embedding, "num_embeddings", None)
        kind, config = type(plain).__name__, getattr(plain, "config", None)
        chooses = getattr(config, "problem_type", None) in (None, "single_label_classification")
        chooses = chooses and getattr(config, "num_labels", None) != 1  # that makes a regression
        self._looks_at_labels = (
            makes_loss and chooses and any(head in kind for head in _CHOOSING_HEADS)
        )

    def check(self, batch: Any, *, makes_loss: bool = True) -> None:
        """Raises Error with the first wrong number. What is on a GPU already is not looked at, and labels only
        where the model makes its loss of them."""
        found = []
        if isinstance(batch, Mapping) and self._words:
            found.append(("input_ids", batch.get("input_ids"), self._words))
        if self._looks_at_labels and makes_loss:
            found += [one for one in _known(self._model, batch, self._names) if one[0] == "labels"]
        on_host = [one for one in found if getattr(one[1], "is_cpu", False)]
        if reason := _first_wrong(on_host):
            raise Error(f"[trainer] {reason}")


def _known(
    model: nn.Module, batch: Any, names: Sequence[str]
) -> list[tuple[str, torch.Tensor | None, int | None]]:
    """(name, numbers, how many a model of transformers knows) of tokens and labels."""
    plain = getattr(model, "_orig_mod", model)
    config = getattr(plain, "config", None)
    words, classes = (getattr(config, name, None) for name in ("vocab_size", "num_labels"))
    labels, ids = counted_in(batch, names), None
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    # One label a sample is a class, one a token is a word or a class of words.
    of_tokens = "TokenClassification" in type(plain).__name__
    is_class = labels is not None and (labels.dim() == 1 or of_tokens or not words)
    return [("input_ids", ids, words), ("labels", labels, classes if is_class else words)]


def _first_wrong(known: Sequence[tuple[str, torch.Tensor | None, int | None]]) -> str:
    for name, values, count in known:
        if not isinstance(values, torch.Tensor) or values.is_floating_point() or not count:
            continue
        # In labels -100 is what is not counted.
        wrong = values[(values >= count) | ((values < 0) & ((values != -100) | (name != "labels")))]
        if wrong.numel() > 0:
            return f"{name} have {int(wrong[0])}, and the model knows 0 to {count - 1}" + (
                " (-100: not counted)" if name == "labels" else ""
            )
    return ""


def _out_of_range(model: nn.Module, batch: Any, names: Sequence[str]) -> str:
    """The number that a model of transformers has no class or word for; of others what there is."""
    known = _known(model, batch, names)
    if reason := _first_wrong(known):
        return reason
    if any(count for _, _, count in known):
        return ""
    labels = counted_in(batch, names)
    entries = [*_inputs(batch, names), *([("labels", labels)] if labels is not None else [])]
    spans = [
        f"{name} has {int(v.min())} to {int(v.max())}"
        for name, v in entries
        if not v.is_floating_point() and v.dtype != torch.bool and v.numel() > 0
    ]
    if not spans:
        return ""
    return (
        f"a number is outside of what the model knows: {', '.join(spans)}; numbers begin at 0 and end "
        "below the number of words or classes, and of labels -100 is left out"
    )


def _inputs(batch: Any, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    """Tensors with values, but for labels."""
    found = labels_in(batch, names)
    labels = found if isinstance(found, tuple) else (found,)
    if isinstance(batch, Mapping):
        named = [(str(name), value) for name, value in batch.items()]
    elif isinstance(batch, (tuple, list)):
        named = [(f"input {i}", value) for i, value in enumerate(batch)]
    else:
        named = [("the batch", batch)]
    return [
        (name, value)
        for name, value in named
        if isinstance(value, torch.Tensor) and not any(value is one for one in labels)
    ]


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
