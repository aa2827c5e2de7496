"""An engine's moments as the state of a torch optimizer over the same parameters, and back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from poise._C import Error
from poise.config import settings_of
from poise.torch_settings import kind_of

if TYPE_CHECKING:
    from poise.engine import Engine

logger = logging.getLogger("poise")

# Names of torch's state, in the order of the engine's moments.
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lars": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
}
COUNTED = ("adamw", "adam", "lamb")  # whose state has the number of steps


def fill(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """The engine's moments and number of updates into optimizer.state; all ranks get whole ones."""
    kind = kind_of(optimizer)
    if kind not in MOMENTS:
        raise Error(
            f"[engine] the moments of {kind} are kept in another form than torch's; save with "
            "engine.save() instead"
        )
    for parameter in _trained_by(optimizer, engine):
        steps = engine.updates - engine.missed_updates(parameter)
        if steps == 0 and kind in COUNTED:
            continue
        moments = [moment.clone() for moment in engine.moments(parameter)]
        if steps == 0 and not any(moment.any() for moment in moments):  # else somebody gave them
            continue
        optimizer.state[parameter] = dict(zip(MOMENTS[kind], moments, strict=False))
        if kind in COUNTED:
            optimizer.state[parameter]["step"] = torch.tensor(float(steps))


def take(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """optimizer.state becomes the engine's moments and number of updates; all ranks."""
    held, kind = optimizer.state, kind_of(optimizer)
    parameters = _trained_by(optimizer, engine)
    if held and kind == "adafactor":
        raise Error(
            "[loop] Adafactor has state already, which the engine keeps in another form; begin with a "
            "fresh one"
        )
    with_state = [parameter for parameter in parameters if held.get(parameter)]
    steps = {id(p): held[p]["step"] for p in with_state if "step" in held[p]}
    for parameter in with_state:  # all of them before one is taken
        for key in MOMENTS[kind]:
            _check_shape(engine, parameter, key, held[parameter].get(key))
    for parameter in with_state:
        moments = [held[parameter].get(key) for key in MOMENTS[kind]]
        moments = [torch.zeros_like(parameter) if m is None else m for m in moments]
        engine.set_moments(parameter, [m.float() for m in moments])
    stateless = {id(p) for p in parameters} - {id(p) for p in with_state}
    if with_state and stateless:
        names = [name for name, p in engine.model.named_parameters() if id(p) in stateless]
        logger.warning(
            "[loop] %d parameters have no state in the optimizer (the first is %s): their moments "
            "begin at zero",
            len(names),
            names[0],
        )
    if not steps:
        return  # torch's SGD counts none
    updates = int(max(steps.values()))
    engine.set_updates(updates)
    for parameter in parameters:
        engine.set_missed_updates(parameter, updates - int(steps.get(id(parameter), 0)))


def check_fits(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Raises Error where the optimizer is not the engine's kind, or not over its parameters."""
    kind, of_engine = kind_of(optimizer), settings_of(engine.config)["optimizer"]["type"]
    if kind != of_engine:
        raise Error(f"[engine] the optimizer is {kind}, and the engine's is {of_engine}")
    wanted = {id(p): name for name, p in engine.model.named_parameters() if engine.trains(p)}
    held = {id(p) for p in _trained_by(optimizer, engine)}
    missing = [name for parameter, name in wanted.items() if parameter not in held]
    if missing or len(held) > len(wanted):
        example = f"has no parameter '{missing[0]}'" if missing else "has others besides"
        raise Error(
            f"[engine] the optimizer is not over the engine's {len(wanted)} trained parameters: it "
            f"{example}; make it from model.parameters()"
        )


def _check_shape(
    engine: Engine, parameter: torch.Tensor, key: str, moment: torch.Tensor | None
) -> None:
    if moment is None or moment.shape == parameter.shape:
        return
    raise Error(
        f"[engine] the optimizer's {key} of '{engine.name_of(parameter)}' has shape {tuple(moment.shape)}, "
        f"and the parameter {tuple(parameter.shape)}; give the state of an optimizer of this model"
    )


def _trained_by(optimizer: torch.optim.Optimizer, engine: Engine) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if engine.trains(p)]
