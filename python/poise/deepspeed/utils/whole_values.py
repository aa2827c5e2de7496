"""`deepspeed.utils.safe_get_full_*` and `safe_set_full_*`, of poise: a parameter's fp32 value, gradient and
moments, whole at every stage, wherever they lie. All ranks call, with the same values where they set."""

from __future__ import annotations

import torch

from poise._C import Error
from poise.config import settings_of
from poise.deepspeed import engine as engines
from poise.engine import Engine, engine_of
from poise.optimizer_state import MOMENTS


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """A copy of its value; of a 16-bit parameter, of its fp32 master."""
    return _engine(param, "safe_get_full_fp32_param").master(param).detach().clone()


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Between windows."""
    _engine(param, "safe_set_full_fp32_param").set_master(param, value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor:
    """The window's mean gradient, unscaled and unclipped, in fp32: between the backward() of its last
    micro-batch and step(). A micro-batch's own is never there."""
    engine = _engine(param, "safe_get_full_grad")
    return engines.of(engine).window_gradient(param).clone()


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Where safe_get_full_grad has one: what step() will use instead."""
    engine = _engine(param, "safe_set_full_grad")
    with torch.no_grad():
        engines.of(engine).window_gradient(param).copy_(value)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor:
    """A copy of a moment, by torch's name: exp_avg, exp_avg_sq, momentum_buffer."""
    engine = _engine(param, "safe_get_full_optimizer_state")
    return engine.moments(param)[_index(engine, optim_state_key)].clone()


def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Between windows."""
    engine = _engine(param, "safe_set_full_optimizer_state")
    moments = engine.moments(param)
    moments[_index(engine, optim_state_key)] = value
    engine.set_moments(param, moments)


def _engine(param: torch.Tensor, call: str) -> Engine:
    engine = engine_of(param)
    if engine is None:
        raise Error(
            f"[deepspeed] {call}: a tensor of shape {tuple(param.shape)} is no parameter of an engine; "
            "give one of engine.module.parameters()"
        )
    return engine


def _index(engine: Engine, key: str) -> int:
    kind = settings_of(engine.config)["optimizer"]["type"]
    names = MOMENTS.get(kind, ())
    if key not in names:
        has = f"its moments are {', '.join(names)}" if names else "they have another form"
        raise Error(f"[deepspeed] {kind} keeps no {key!r}: {has}")
    return names.index(key)
