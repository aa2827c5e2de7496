"""What a loss function may return, turned into the parts that the engine weighs.

A micro-batch's loss is a mean with the number of tokens it counted, a sum, or one value per token.
Only with counts is an accumulated gradient the same as that of one big batch (docs/concepts.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from poise._C import Error

Count = int | float | torch.Tensor | None
Parts = tuple  # (value, kind, count, [(value, kind, count, weight), ...]), as the binding reads it

ALLOWED = (
    "return a scalar tensor, (loss, n), a dictionary with 'loss' (and 'n' or 'num_tokens', "
    "'terms'), an output with .loss, or poise.Loss"
)


@dataclasses.dataclass
class Term:
    """A further term of a loss, with a denominator of its own.

    Attributes:
      value: a scalar tensor, or one value per token.
      count: how many tokens (or samples) it counts.
      kind: "mean", "sum" or "per_token".
      weight: factor of the term in the total.
    """

    value: torch.Tensor
    count: Count = None
    kind: str = "mean"
    weight: float = 1.0


@dataclasses.dataclass
class Loss:
    """A micro-batch's loss with what is needed to weigh it.

    Attributes:
      value: a scalar tensor; for kind "per_token" a tensor of any shape.
      count: number of counted tokens (or samples); a 0-dim tensor costs no host sync.
      kind: "mean", "sum" or "per_token".
      terms: further terms; the window's counts must then be given to engine.step.
    """

    value: torch.Tensor
    count: Count = None
    kind: str = "mean"
    terms: Iterable[Term | tuple] = ()


def loss_parts(result: Any, tokens: Count = None) -> Parts:
    """Reads what a loss function returned.

    Args:
      result: one of the forms in ALLOWED.
      tokens: count of a mean that comes without one.
    """
    loss = as_loss(result)
    count = loss.count if loss.count is not None else tokens
    _check(loss.value, loss.kind, count)
    return loss.value, loss.kind, count, [_term_parts(term) for term in loss.terms]


def as_loss(result: Any) -> Loss:
    """The same as a Loss."""
    if isinstance(result, Loss):
        return result
    if isinstance(result, torch.Tensor):
        return Loss(result)
    if isinstance(result, Mapping):
        return _from_mapping(result)
    if isinstance(result, tuple):
        return _from_tuple(result)
    if getattr(result, "loss", None) is not None:
        return Loss(result.loss, getattr(result, "num_tokens", None))
    raise Error(f"[engine] the loss function returned {_describe(result)}; {ALLOWED}")


def _from_mapping(result: Mapping) -> Loss:
    value = result.get("loss")
    if value is None:
        keys = ", ".join(map(str, result)) or "nothing"
        raise Error(
            f"[engine] the loss function returned a dictionary without 'loss' but {keys}; {ALLOWED}"
        )
    count = result.get("n")
    if count is None:
        count = result.get("num_tokens")
    terms = result.get("terms") or ()
    if isinstance(terms, Mapping):
        terms = terms.values()
    return Loss(value, count, result.get("kind", "mean"), tuple(terms))


def _from_tuple(result: tuple) -> Loss:
    if len(result) == 2 and isinstance(result[0], torch.Tensor) and _is_count(result[1]):
        return Loss(result[0], result[1])
    inside = ", ".join(_describe(entry) for entry in result)
    raise Error(
        f"[engine] the loss function returned the tuple ({inside}); a tuple must be (loss, n)"
    )


def _term_parts(term: Any) -> tuple:
    if isinstance(term, tuple):
        term = Term(*term)  # (value, count, kind, weight), the last two may be left out
    if not isinstance(term, (Term, Loss)):
        raise Error(
            f"[engine] a term of the loss is {_describe(term)}; use (value, n) or poise.Term"
        )
    _check(term.value, term.kind, term.count)
    return term.value, term.kind, term.count, float(getattr(term, "weight", 1.0))


def _check(value: Any, kind: str, count: Count) -> None:
    if not isinstance(value, torch.Tensor):
        raise Error(f"[engine] the loss is {_describe(value)}, not a tensor; {ALLOWED}")
    if kind != "per_token" and value.numel() != 1:
        raise Error(
            f"[engine] the loss has shape {tuple(value.shape)}, a {kind} has one element; reduce "
            "it, or return poise.Loss(values, kind='per_token')"
        )
    if count is not None and not _is_count(count):
        raise Error(
            f"[engine] the count of a loss is {_describe(count)}; give a number or a 0-dim tensor"
        )


def _is_count(count: Any) -> bool:
    if isinstance(count, torch.Tensor):
        return count.numel() == 1 and not count.requires_grad
    return isinstance(count, (int, float)) and not isinstance(count, bool)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (int, float, type(None))):
        return repr(value)
    return type(value).__name__
