"""A model's loss without whole logits: its forward ends where it would call its head, and the loss
of the head's input is made in pieces (poise.chunked_cross_entropy).

That is only the same loss where the forward does nothing else between head and loss, so the first
batch is also run whole, on a few tokens, and a difference is refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from poise import model_view, wrong_batch
from poise._C import Error
from poise.checkpointing import chunked_cross_entropy
from poise.evaluation import eval_mode
from poise.labels import counted_in
from poise.loss import Loss
from poise.model_call import ModelCall, call_model

NAMES = ("lm_head", "head")
IGNORED = -100
CHECKED_ROWS, CHECKED_LENGTH = 4, 64
# The check's largest logit: a cap or a scale on logits shows there, which it does not near zero.
LARGEST_LOGIT = 30.0


class ChunkedHead:
    """Gives the loss of a batch, as ModelCall does, with the logits of `chunk_tokens` rows at a time.

    Args:
      model: calls its head, a Linear, once; see find_head.
      call: makes the model's own loss, which ours is compared with.
      chunk_tokens: rows whose logits exist at once.
    """

    def __init__(self, model: nn.Module, call: ModelCall, chunk_tokens: int) -> None:
        if model_view.is_compiled(model):
            _refuse("the model is compiled as a whole, which hides its head; compile its blocks")
        self._model, self._call, self._chunk_tokens = model, call, chunk_tokens
        self._name, self._head = find_head(model)
        self._checked = False

    def __call__(self, batch: Any) -> Loss:
        with wrong_batch.explained(self._model, batch, self._call.label_names):
            if not self._checked:
                self._check(batch)
                self._checked = True
            return self._loss(batch, scale=1.0)

    def _loss(self, batch: Any, scale: float) -> Loss:
        labels = _classes_in(batch, self._call.label_names)
        hidden = self._hidden(batch)
        if self._call.shift_labels and labels.dim() > 1:
            hidden, labels = hidden[:, :-1], labels[:, 1:]
        if hidden.shape[:-1] != labels.shape:
            _refuse(
                f"the head gets {list(hidden.shape)}, which does not fit labels of "
                f"{list(labels.shape)}"
            )
        total, counted = chunked_cross_entropy(
            hidden * scale if scale != 1.0 else hidden,
            self._head.weight,
            self._head.bias,
            labels,
            self._chunk_tokens,
            IGNORED,
        )
        return Loss(total, counted, kind="sum")

    def _hidden(self, batch: Any) -> torch.Tensor:
        """What the head gets; the forward ends there."""

        def stop(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            raise _HeadReached(inputs[0])

        try:
            with _before(self._head, stop):
                call_model(self._model, batch)
        except _HeadReached as reached:
            return reached.hidden
        _refuse(f"the model's forward does not call its head, {self._name}")

    def _check(self, batch: Any) -> None:
        small = _part_of(batch, self._call.label_names)
        device = self._head.weight.device
        with (
            eval_mode(self._model),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autocast(device.type, enabled=False),
        ):
            logits = F.linear(self._hidden(small), self._head.weight)
            scale = LARGEST_LOGIT / max(float(logits.abs().amax()), 1e-6)

            def scaled(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
                return (inputs[0] * scale, *inputs[1:])

            with _before(self._head, scaled):
                own = _mean(self._call(small))
            ours = _mean(self._loss(small, scale))
        tolerance = 1e-4 if self._head.weight.dtype in (torch.float32, torch.float64) else 2e-2
        if not math.isclose(own, ours, rel_tol=tolerance, abs_tol=tolerance):
            _refuse(
                f"the model's own loss is {own:.6g}, that of its head {self._name} in pieces "
                f"{ours:.6g} (on a few tokens, with large logits): the forward does more than a "
                "mean cross-entropy of the head's output, for example a cap or scale on logits, "
                "smoothing, or another term"
            )


def find_head(model: nn.Module) -> tuple[str, nn.Linear]:
    """The Linear that makes the logits: get_output_embeddings(), or the one called lm_head or head."""
    names = {id(module): name for name, module in model.named_modules()}
    ask = getattr(model, "get_output_embeddings", None)
    told = ask() if callable(ask) else None
    if told is not None:
        found = [(names.get(id(told), "get_output_embeddings()"), told)]
    else:
        last_parts = ((name, name.rpartition(".")[2], m) for name, m in model.named_modules())
        found = [(name, m) for name, last, m in last_parts if last in NAMES]
    if len(found) != 1:
        which = ", ".join(name for name, _ in found) or "none"
        _refuse(f"the model must have one module called lm_head or head; it has {which}")
    name, head = found[0]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        _refuse(f"{name} is {type(head).__name__}, not a plain torch.nn.Linear")
    if head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head):
        _refuse(f"{name} has hooks or a forward of its own, which would be passed over")
    return name, head


class _HeadReached(BaseException):  # `except Exception` in a forward lets it pass
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("the forward reached the head")
        self.hidden = hidden


@contextlib.contextmanager
def _before(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _mean(loss: Loss) -> float:
    value = float(loss.value.detach().double().sum())
    return value if loss.kind == "mean" else value / max(float(loss.count), 1.0)


def _part_of(batch: Any, label_names: Sequence[str]) -> Any:
    """A few rows, and of sequences a few tokens, all of them labelled but the last masked ones."""
    labels = _classes_in(batch, label_names)
    tensors = [v for v in _values(batch) if isinstance(v, torch.Tensor) and v.dim() > 0]
    rows, sequences = len(labels), labels.dim() == 2
    length = labels.shape[1] if sequences else 0
    # Cut only where every tensor is [rows] or [rows, length]: other shapes may depend on both.
    whole_rows = all(t.shape[0] == rows for t in tensors)
    cut = sequences and whole_rows and all(t.shape[1:] in ((), (length,)) for t in tensors)
    masked = bool((labels == IGNORED).any())

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or not whole_rows:
            return value
        value = value[: 1 if sequences else CHECKED_ROWS]
        return value[:, :CHECKED_LENGTH] if cut and value.dim() == 2 else value

    def part_of(value: Any) -> Any:
        made = part(value)
        if value is not labels:
            return made
        made = made.clamp(min=0)
        if masked and made.numel() > 2:
            made[..., -1] = IGNORED  # the model must leave out what we leave out
        return made

    if isinstance(batch, Mapping):
        return {name: part_of(value) for name, value in batch.items()}
    return type(batch)(part_of(value) for value in batch)


def _classes_in(batch: Any, label_names: Sequence[str]) -> torch.Tensor:
    labels = counted_in(batch, label_names)
    if labels is None or labels.is_floating_point():
        they_are = "" if labels is None else f": they are {labels.dtype}"
        _refuse(f"the batch has no labels that name classes{they_are}")
    return labels


def _values(batch: Any) -> Any:
    return batch.values() if isinstance(batch, Mapping) else batch


def _refuse(reason: str) -> NoReturn:
    raise Error(
        f"[trainer] loss_chunk_tokens cannot be used: {reason}. Set it to 0, or call "
        "poise.chunked_cross_entropy in the model's forward"
    )
