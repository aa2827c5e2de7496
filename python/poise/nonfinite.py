"""Why a loss is not finite: looked for once a run has stopped over it, so that the run costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from poise import model_view
from poise._C import Error
from poise.engine import Engine
from poise.loss import Loss

LossFn = Callable[[Any], Loss]
NOT_FOUND = "Parameters and inputs are finite, and so was a second forward of the same window"


@contextlib.contextmanager
def explained(engine: Engine, window: list[Any], loss_fn: LossFn, last_save: str) -> Iterator[None]:
    """Adds the cause to the Error of an update that was stopped over a non-finite loss or gradient,
    and where to go on from: `last_save`, or nowhere if that is empty."""
    skipped = engine.skipped_updates
    try:
        yield
    except Error as error:
        if engine.skipped_updates == skipped:
            raise
        why = cause(engine, window, loss_fn)
        where = f"The last save is {last_save}" if last_save else "Nothing was saved in this run"
        raise Error(f"{error}. {why}. {where}") from None


def cause(engine: Engine, window: list[Any], loss_fn: LossFn) -> str:
    """A sentence: the first parameter, input or module's output that is not finite, on some rank.

    All ranks look, each in its own micro-batches; the first that finds something is quoted.
    """
    group = engine.group
    with engine.gathered():  # a forward then needs no other rank
        mine = _cause_here(engine, window, loss_fn)
    if group.size == 1:
        return mine or NOT_FOUND
    found = enumerate(group.all_gather_text(mine, "what is not finite"))
    return next((f"On rank {rank}: {text}" for rank, text in found if text), NOT_FOUND)


def _cause_here(engine: Engine, window: list[Any], loss_fn: LossFn) -> str:
    model = engine.model
    for name, tensor in model_view.named_parameters(model):
        if bad := _bad_values(tensor):
            return f"The parameter '{name}' itself has {bad}"
    for number, batch in enumerate(window, start=1):
        for name, tensor in _named_tensors(batch):
            if bad := _bad_values(tensor):
                return f"Micro-batch {number} of {len(window)} has {bad} in its input {name}"
    # After the inputs: running statistics follow them.
    for name, tensor in model_view.named_buffers(model):
        if bad := _bad_values(tensor):
            return f"The buffer '{name}' itself has {bad}"
    return _cause_in_forward(engine, window, loss_fn)


def _cause_in_forward(engine: Engine, window: list[Any], loss_fn: LossFn) -> str:
    watched = {} if model_view.is_compiled(engine.model) else dict(engine.model.named_modules())
    with _nothing_changes(engine.model), torch.no_grad():
        for number, batch in enumerate(window, start=1):
            with _FirstBadOutput(watched) as first, engine.forward_scope():
                loss = loss_fn(batch).value
            where = f"micro-batch {number} of {len(window)}"
            if first.found is not None:
                return f"The first output that is not finite is that of {first.found}, in {where}"
            if _bad_values(loss):
                return (
                    f"No module's output has a NaN or inf in {where}, only its loss is not finite"
                )
    return ""


class _FirstBadOutput:
    """Notes the first module, in order of execution, whose output has a NaN or an infinity.

    Negative infinity alone is what masks are made of.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self.found: str | None = None

    def __enter__(self) -> _FirstBadOutput:
        self._handles = [
            module.register_forward_hook(self._hook(name)) for name, module in self._modules.items()
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.found is None and any(_is_bad(t) for _, t in _named_tensors(output)):
                shown = model_view.plain_name(name)
                kind = type(module).__name__
                self.found = f"'{shown}' ({kind})" if shown else f"the model ({kind})"

        return look


@contextlib.contextmanager
def _nothing_changes(model: nn.Module) -> Iterator[None]:
    """Random streams and buffers (running statistics) are afterwards as they were."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)


def _named_tensors(value: Any, name: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _named_tensors(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from _named_tensors(entry, f"{name}[{index}]")


def _is_bad(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    return bool((tensor.isnan() | (tensor == torch.inf)).any())


def _bad_values(tensor: torch.Tensor) -> str:
    """ "3 of 100 values that are not finite"; empty: there is none."""
    if not tensor.is_floating_point():
        return ""
    count = int((~tensor.detach().isfinite()).sum())
    return f"{count} of {tensor.numel()} values that are not finite" if count else ""
