"""A model's state_dict with whole tensors, where its parameters may be sharded."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poise import model_view, ranks

if TYPE_CHECKING:
    from poise.engine import Engine


def of(engine: Engine, rank: int | None, device: torch.device | str | None) -> dict[str, Any]:
    """The state_dict as copies; all ranks.

    Unit by unit, so that a rank holds no more than one of them whole besides what it copies. A model
    whose state_dict has other tensors than parameters and buffers (made of them by a hook) is made
    whole at once instead.

    Args:
      engine: between windows.
      rank: the only one that gets it; the others an empty one. None: all.
      device: of the copies; None: where the tensors are.
    """
    mine = rank is None or engine.group.rank == rank

    if not engine.shards_parameters() or any(
        ranks.any_of(engine.group, [_entries(engine) is None])
    ):
        with engine.gathered():
            return copied(dict(engine.model.state_dict()), device) if mine else {}
    copies: dict[int, torch.Tensor] = {}  # by id of the parameter
    for unit in engine.units:
        with engine.gathered_unit(unit) as parameters:
            if mine:
                copies |= {id(parameter): _copy(parameter, device) for _, parameter in parameters}
    return copied(_entries(engine), device, copies) if mine else {}


def places(model: nn.Module, made_on: torch.device) -> dict[str, torch.device]:
    """Where parameters and buffers are, by name; those without memory will be on `made_on`."""
    named = (*model_view.named_parameters(model), *model_view.named_buffers(model))
    return {name: made_on if t.device.type == "meta" else t.device for name, t in named}


def give_back(engine: Engine, came_from: dict[str, torch.device]) -> None:
    """Each parameter with memory of its own, whole, where it came from, and buffers too; unit by unit, all
    ranks."""
    values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tied ones once
    for unit in engine.units:
        with engine.gathered_unit(unit) as parameters:
            for name, p in parameters:
                if id(p) not in values:
                    values[id(p)] = p, p.detach().to(came_from[name], copy=True)
    for parameter, value in values.values():
        parameter.data = value
    for name, buffer in model_view.named_buffers(engine.model):
        buffer.data = buffer.data.to(came_from.get(name, buffer.device))  # some are made later


def no_copy(what: str, name: str, module: str) -> str:
    """What copy.deepcopy, pickle and torch.save say of a thing that has an engine."""
    return (
        f"[engine] {what} cannot be copied or pickled: its parameters, moments and sums live in memory of "
        f"its own. {name}.save(directory) keeps all of a run; {name}.state_dict() has the model's values; "
        f"copy.deepcopy({module}) is a model of torch's alone, made within engine.gathered() where "
        "parameters are sharded or offloaded"
    )


def _entries(engine: Engine) -> dict[str, Any] | None:
    """The parameters and buffers themselves by name; None where the model gives other tensors."""
    known = {id(t) for t in (*engine.model.parameters(), *engine.model.buffers())}
    with contextlib.suppress(Exception):  # of a hook that reads what is not whole
        entries = engine.state_entries()
        if all(id(v) in known for v in entries.values() if isinstance(v, torch.Tensor)):
            return entries
    return None


def copied(
    entries: dict[str, Any],
    device: torch.device | str | None = None,
    copies: dict[int, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Copies of all tensors; what is the same values under several names is one copy.

    Args:
      entries: by name.
      device: of the copies; None: where the tensors are.
      copies: by id of the tensor, where they are made already.
    """
    copies = copies or {}
    made: dict[tuple, torch.Tensor] = {}
    result = {}
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor):
            result[name] = value
        elif id(value) in copies:
            result[name] = copies[id(value)]
        else:
            key = (value.data_ptr(), value.dtype, value.size(), value.stride())
            if key not in made or value.numel() == 0:
                made[key] = _copy(value, device)
            result[name] = made[key]
    return result


def _copy(value: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    return value.detach().to(device or value.device, copy=True)
