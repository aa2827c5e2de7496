"""The model of a Trainer: given, or made by model_init."""

from __future__ import annotations

import inspect
from collections.abc import Callable

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
