"""The model of a Trainer: given, or made by model_init."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from poise._C import Error
from poise.seeding import seed_everything


def first(
    model: nn.Module | None, model_init: Callable[..., nn.Module] | None, seed: int
) -> nn.Module:
    """The model that a Trainer begins with."""
    if (model is None) == (model_init is None):
        which = "both model and model_init" if model is not None else "no model"
        raise Error(f"[trainer] {which} given; give one of model and model_init")
    if model is None:
        return made(model_init, seed)
    if not isinstance(model, nn.Module):
        raise Error(f"[trainer] the model is {type(model).__name__}; give a torch.nn.Module")
    return model


def made(model_init: Callable[..., nn.Module], seed: int) -> nn.Module:
    """A new model, the same one for the same seed."""
    seed_everything(seed)
    # transformers' functions may take the trial of a search, of which there is none.
    takes_trial = len(inspect.signature(model_init).parameters) == 1
    model = model_init(None) if takes_trial else model_init()
    if not isinstance(model, nn.Module):
        raise Error(
            f"[trainer] model_init returned {type(model).__name__}; return a torch.nn.Module"
        )
    return model


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Models of transformers keep keys and values for generating unless their config says no: bytes
    that training has no use for, and a recomputed block would fill them twice. Encoder, decoder and
    text part may have configs of their own; what generate() goes by is none of them."""
    keeping = [one for one in _configs(model) if getattr(one, "use_cache", False) is True]
    for one in keeping:
        one.use_cache = False
    try:
        yield
    finally:
        for one in keeping:
            one.use_cache = True


def _configs(model: nn.Module) -> list[Any]:
    """Of all modules, and those that they hold."""
    found: dict[int, Any] = {}

    def take(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "to_dict"):
            return
        found[id(config)] = config
        for value in list(vars(config).values()):
            take(value)

    for module in model.modules():
        take(getattr(module, "config", None))
    return list(found.values())
