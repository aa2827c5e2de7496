"""What a torch optimizer's groups ask for, as settings of the engine; refused where it has no kernel."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from poise import optimizers
from poise._C import Error

_REFUSED = ("amsgrad", "maximize", "differentiable")  # in a group; all False by default
_FIXED = (
    "clip_threshold",
    "decay_rate",
    "scale_parameter",
    "decoupled_weight_decay",
    "nesterov",
    "min_coeff",
    "max_coeff",
    "trust_coefficient",
)  # for as long as an engine lives
_ADAFACTOR = ("beta1", "relative_step", "warmup_init")  # of transformers; none of them here
_SHARED = ("betas", "eps", "momentum", "dampening", *_FIXED, *_ADAFACTOR)
_NUMBERS = ("lr", "weight_decay", "betas", "eps", "momentum")
_KINDS = {  # by class; AdamW and Adam by their group's option, too
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    optimizers.Lion: "lion",
    optimizers.Lamb: "lamb",
    optimizers.Lars: "lars",
}


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Its name in the engine's settings; raises Error on one that the engine has no kernel for."""
    for known, kind in _KINDS.items():
        if isinstance(optimizer, known) and _same_step(type(optimizer), known):
            if kind not in ("adamw", "adam"):
                return kind
            decoupled = optimizer.param_groups[0].get("decoupled_weight_decay", kind == "adamw")
            return "adamw" if decoupled else "adam"
    if _is_adafactor(optimizer):
        return "adafactor"
    raise Error(
        f"[loop] the optimizer is {type(optimizer).__name__}; poise has kernels for torch.optim.AdamW, "
        "Adam and SGD, for transformers' Adafactor, and for those of poise.optimizers: use one of "
        "these, or keep this loop in plain torch"
    )


def to_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer section of the engine's settings."""
    kind = kind_of(optimizer)
    check_groups(optimizer)
    first = optimizer.param_groups[0]
    settings = {"type": kind, "lr": float(first["lr"])}
    # torch decays whatever is in a group with weight_decay, biases too.
    settings |= {"weight_decay": float(first["weight_decay"]), "decay_rule": "all"}
    if kind == "sgd":
        return settings | {"momentum": first["momentum"], "nesterov": first["nesterov"]}
    if kind == "adafactor":
        return settings | {
            "eps_square": float(first["eps"][0]),
            "eps_scale": float(first["eps"][1]),
            "clip_threshold": float(first["clip_threshold"]),
            "decay_rate": float(first["decay_rate"]),
            "scale_parameter": bool(first["scale_parameter"]),
        }
    if kind == "lars":
        names = ("momentum", "trust_coefficient")
        return settings | {name: float(first[name]) for name in names}
    if kind == "lamb":
        limits = {"min_trust": "min_coeff", "max_trust": "max_coeff"}
        settings |= {ours: float(first[name]) for ours, name in limits.items()}
    beta1, beta2 = (float(beta) for beta in first["betas"])
    settings |= {"beta1": beta1, "beta2": beta2}
    return settings | ({"eps": float(first["eps"])} if "eps" in first else {})


def check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raises Error on an option that the engine would not follow, and on one that is no number."""
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups:
        steps = [name for name in _ADAFACTOR if group.get(name)]
        if steps:
            raise Error(
                f"[loop] Adafactor has {steps[0]}={group[steps[0]]}; poise's is without momentum and "
                "relative steps: give it lr, relative_step=False and a scheduler"
            )
        on = [name for name in _REFUSED if group.get(name)]
        if on:
            raise Error(
                f"[loop] the optimizer has {on[0]}=True, which poise has no kernel for; set it to "
                "False, or keep this loop in plain torch"
            )
        for name in _SHARED:
            if _plain(group.get(name)) != _plain(first.get(name)):
                raise Error(
                    f"[loop] the optimizer's groups differ in {name} ({first.get(name)} and "
                    f"{group.get(name)}); groups may differ in lr and weight_decay"
                )
        for name in _NUMBERS:
            numbers = _plain(group.get(name, 0.0))
            numbers = numbers if isinstance(numbers, tuple) else (numbers,)
            if not all(math.isfinite(number) for number in numbers):
                raise Error(
                    f"[loop] the optimizer has {name}={group[name]}, which would make every weight "
                    "NaN; give a finite number (look at what the scheduler computed)"
                )
    if first.get("dampening"):
        raise Error(
            f"[loop] the optimizer has dampening={first['dampening']}; poise knows SGD without it: "
            "set it to 0"
        )


def fixed_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an engine that was made for the optimizer cannot change any more."""
    first = optimizer.param_groups[0]
    return {name: first[name] for name in _FIXED if name in first}


def check_unchanged(optimizer: torch.optim.Optimizer, made_for: dict[str, Any]) -> None:
    """Raises Error where fixed_options() are others than those that the engine was made for."""
    now = fixed_options(optimizer)
    for name, value in made_for.items():
        if now.get(name) != value:
            raise Error(
                f"[loop] the optimizer has {name}={now.get(name)} now, and had {name}={value} when "
                "the engine was made; set it back, or make the engine anew with the option set"
            )


def _is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is transformers' class, which need not be installed."""
    kind = type(optimizer)
    return kind.__name__ == "Adafactor" and kind.__module__.startswith("transformers.")


def _plain(value: Any) -> Any:
    """Numbers as Python's: torch holds betas in lists and tuples, and any number in a tensor."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(one) for one in value)
    return value.item() if isinstance(value, torch.Tensor) else value


def _same_step(kind: type, known: type) -> bool:
    """Whether a subclass has the update of `known`: torch wraps step() once for every class."""
    return inspect.unwrap(kind.step) is inspect.unwrap(known.step)
