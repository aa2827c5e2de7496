"""What a loop keeps beside its engine, as the text of a save: rates of a torch optimizer, schedulers,
counters. Plain JSON, so that reading a file runs nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from poise._C import Error

KEY = "poise.loop"  # of the save's texts
_PAIRS, _COUNTER = "poise.pairs", "poise.counter"  # dictionaries whose keys are no texts
_OF_ENGINE = ("params", "foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad")


def text(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], counters: Mapping[str, Any]
) -> str:
    """Raises Error on what JSON has no words for."""
    groups = [
        {name: _plain(value) for name, value in group.items() if name not in _OF_ENGINE}
        for group in optimizer.param_groups
    ]
    states = [_state_of(one) for one in schedulers]
    return as_json({"groups": groups, "schedulers": states, "counters": dict(counters)}, "the loop")


def take(
    saved: str | None, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]
) -> dict[str, Any]:
    """Puts groups and schedulers back and returns the counters; None: a save of something else."""
    if saved is None:
        return {}
    state = from_json(saved)
    if len(state["groups"]) != len(optimizer.param_groups):
        raise Error(
            f"[loop] the save has {len(state['groups'])} parameter groups, the optimizer "
            f"{len(optimizer.param_groups)}; make the same groups"
        )
    if len(state["schedulers"]) != len(schedulers):
        raise Error(
            f"[loop] the save has {len(state['schedulers'])} schedulers, the loop {len(schedulers)}"
        )
    for group, values in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update({n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
    for scheduler, values in zip(schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(values)
    return state["counters"]


def as_json(value: Any, what: str) -> str:
    """Its text, for from_json(); raises Error on what JSON has no words for."""
    try:
        return json.dumps(_keyed(value))
    except (TypeError, ValueError) as error:
        raise Error(
            f"[loop] {what} cannot be saved as JSON: {error}; keep numbers, texts, lists and "
            "dictionaries"
        ) from None


def from_json(text: str) -> Any:
    """What as_json() made the text of; tuples are lists."""

    def back(read: dict[str, Any]) -> Any:
        if len(read) == 1 and _COUNTER in read:
            return Counter(dict(map(tuple, read[_COUNTER])))
        return dict(map(tuple, read[_PAIRS])) if len(read) == 1 and _PAIRS in read else read

    return json.loads(text, object_hook=back)


def _keyed(value: Any) -> Any:
    """With dictionaries as pairs where JSON would make texts of their keys: MultiStepLR's milestones are numbers."""
    if isinstance(value, (list, tuple)):
        return list(map(_keyed, value))
    if not isinstance(value, Mapping):
        return value
    if all(isinstance(name, str) for name in value) and not isinstance(value, Counter):
        return {name: _keyed(one) for name, one in value.items()}
    pairs = [[name, _keyed(one)] for name, one in value.items()]
    return {_COUNTER if isinstance(value, Counter) else _PAIRS: pairs}


def _state_of(scheduler: Any) -> dict[str, Any]:
    # Functions are the program's own; a scheduler keeps them over load_state_dict.
    return {name: _plain(v) for name, v in scheduler.state_dict().items() if not callable(v)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value
