"""A torch.nn.Module as the engine sees it: parameters and buffers by name, and its units."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from poise._C import Error

NamedTensors = list[tuple[str, torch.Tensor]]
Units = list[tuple[str, list[str]]]
UnitChoice = Sequence[str | type] | None

COMPILED = "_orig_mod."  # what torch.compile puts in front of the names of a module it wraps


def plain_name(name: str) -> str:
    """The name without torch.compile's prefixes: the same with and without it."""
    return name.replace(COMPILED, "")


def is_compiled(model: nn.Module) -> bool:
    """Whether the whole model was compiled, by torch.compile(model) or model.compile()."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether the model or a module in it was compiled, or a module's forward. Such code must not meet
    a mode of torch's (TorchDispatchMode): it would run uncompiled from then on."""
    return any(
        is_compiled(module) or any(hasattr(one, "_torchdynamo_orig_callable") for one in forwards)
        for module, forwards in ((m, _own_forwards(m)) for m in model.modules())
    )


def _own_forwards(module: nn.Module) -> Iterator[Any]:
    """What stands in for its class's forward, and what that stands over."""
    forward = vars(module).get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "own", None)


def named_parameters(model: nn.Module) -> NamedTensors:
    """All parameters; a tied one comes under each of its names."""
    return [(plain_name(name), p) for name, p in model.named_parameters(remove_duplicate=False)]


def device_of(model: nn.Module) -> torch.device:
    """Of the first parameter; the CPU where there is none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def moved_to(model: nn.Module, device: torch.device) -> nn.Module:
    """The model there. One that is there already is not asked to: quantized ones refuse to move."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return model if all(t.device == device for t in tensors) else model.to(device)


def named_buffers(model: nn.Module) -> NamedTensors:
    return [(plain_name(name), buffer) for name, buffer in model.named_buffers()]


def lasting_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Those of its state_dict: running statistics, not masks and tables that forward only reads."""
    return [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def find_units(model: nn.Module, units: UnitChoice = None) -> list[tuple[str, nn.Module]]:
    """The modules that are kept, gathered and recomputed as one, in order of their names.

    Args:
      model: any module.
      units: classes, class names or shell patterns of module names; None: the model's repeated
        blocks.
    """
    if units is None:
        return _repeated_blocks(model)
    found = [
        (plain_name(name), m)
        for name, m in model.named_modules()
        if name and _chosen(name, m, units)
    ]
    found = _outermost(found)
    if not found and len(units):
        wanted = ", ".join(u if isinstance(u, str) else u.__name__ for u in units)
        classes = sorted({type(m).__name__ for m in model.modules()})
        raise Error(
            f"[engine] no module of the model is a unit {wanted}; its classes are "
            f"{', '.join(classes)}"
        )
    return found


def unit_parameters(model: nn.Module, units: Iterable[tuple[str, nn.Module]]) -> Units:
    """The parameters of each unit, by all names that they have inside of it.

    One that several units use is listed by all of them. A name that none lists is a use outside.
    """
    owners = [
        (owner, plain_name(f"{path}.{name}" if path else name))
        for path, owner in model.named_modules(remove_duplicate=False)
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]
    listed = []
    for unit, module in units:
        inside = set(module.modules())
        listed.append((unit, [name for owner, name in owners if owner in inside]))
    return [unit for unit in listed if unit[1]]


def _chosen(name: str, module: nn.Module, units: Sequence[str | type]) -> bool:
    for unit in units:
        if isinstance(unit, type):
            if isinstance(module, unit):
                return True
        elif type(module).__name__ == unit or fnmatch.fnmatchcase(plain_name(name), unit):
            return True
    return False


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    names = [name for name, _ in found]
    return [(n, m) for n, m in found if not any(n.startswith(f"{other}.") for other in names)]


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Entries of the list that holds most parameters; lists of one class before mixed ones, and a ModuleList with one
    entry (a model cut down to one layer) where there is no longer list.

    view() of the C++ library has the same rule (src/engine/view.cpp).
    """
    best: tuple[bool, bool, int] = (False, False, 0)
    blocks: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        long = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
        if not long and not (isinstance(module, nn.ModuleList) and len(module) == 1):
            continue
        rank = (long, is_uniform(module), _numel(module))
        if rank > best and rank[2] > 0:
            best = rank
            prefix = plain_name(f"{name}." if name else "")
            blocks = [(f"{prefix}{child}", m) for child, m in module.named_children()]
    return blocks


def is_uniform(modules: Iterable[nn.Module]) -> bool:
    """Whether all are of one class."""
    return len({type(module) for module in modules}) == 1


def refuse_new_parameters(model: nn.Module, known: Container[int]) -> None:
    """As a window opens: a parameter that came into the model later (a table that was resized, an
    adapter) would get a gradient and never be trained. `known`: ids of those the engine was made with."""
    new: list[torch.Tensor] = []
    modules: dict[nn.Module, None] = {model: None}
    ahead = [model]
    while ahead:  # not by modules(), which makes names: this is part of every update
        module = ahead.pop()
        for p in module._parameters.values():
            if p is not None and id(p) not in known and p.requires_grad:
                new.append(p)
        for child in module._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                ahead.append(child)
    if not new:
        return
    name = next(name for name, p in named_parameters(model) if p is new[0])
    raise Error(
        f"[engine] parameter '{name}' came into the model after the engine was made, which does "
        "not train it; make the engine anew, or set its requires_grad to False"
    )
