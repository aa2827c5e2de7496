"""The yardstick of the parity tests: a loop in plain torch, in float64 or as users write it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import torch
from tiny_models import counted
from torch import nn


@dataclasses.dataclass
class Recipe:
    lr: float = 1e-2
    weight_decay: float = 0.1  # of matrices
    max_grad_norm: float = 0.5
    dtype: torch.dtype = torch.float32  # of the masters
    autocast: torch.dtype | None = None
    parameters: torch.dtype | None = None  # 16-bit parameters beside the masters
    loss_scale: float = 1.0
    optimizer: str = "adamw"  # or sgd, with momentum
    eps: float = 1e-8  # adamw


def train(
    model: nn.Module, windows: list[list[dict]], recipe: Recipe
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Trains a copy of `model`; returns its masters by name and each update's loss."""
    masters = copy.deepcopy(model).to(recipe.dtype)
    forward = masters if recipe.parameters is None else copy.deepcopy(model).to(recipe.parameters)
    optimizer = _optimizer(masters, recipe)
    losses = []
    for window in windows:
        sums, loss = gradients(forward, window, recipe)
        losses.append(loss)
        for parameter, gradient in zip(_trained(masters), sums, strict=True):
            parameter.grad = gradient
        if recipe.max_grad_norm:
            nn.utils.clip_grad_norm_(masters.parameters(), recipe.max_grad_norm)
        optimizer.step()
        if forward is not masters:
            with torch.no_grad():
                for low, master in zip(forward.parameters(), masters.parameters(), strict=False):
                    low.copy_(master)
    return {name: p.detach().double() for name, p in masters.named_parameters()}, losses


def gradients(
    model: nn.Module, window: list[dict], recipe: Recipe
) -> tuple[list[torch.Tensor], float]:
    """The window's mean gradient, summed over micro-batches in the masters' dtype."""
    parameters = _trained(model)
    total = sum(counted(piece).item() for piece in window)
    sums = [torch.zeros_like(p, dtype=recipe.dtype) for p in parameters]
    loss_sum = 0.0
    for piece in window:
        if (n := counted(piece).item()) == 0:
            continue  # a mean over nothing is NaN
        scope = contextlib.nullcontext()
        if recipe.autocast is not None:
            scope = torch.autocast("cpu", dtype=recipe.autocast, cache_enabled=False)
        with scope:
            loss = model(**piece)
        weighted = loss.to(torch.promote_types(loss.dtype, torch.float32)) * (
            recipe.loss_scale * n / total
        )
        for gradient, summed in zip(
            torch.autograd.grad(weighted, parameters, allow_unused=True), sums, strict=False
        ):
            if gradient is not None:
                summed += gradient.to(recipe.dtype) / recipe.loss_scale
        loss_sum += loss.item() * n / total
    return sums, loss_sum


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


MOMENTUM = 0.9


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=MOMENTUM)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.999), eps=recipe.eps)


def error(values: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """L2 distance over all parameters, relative to the reference."""
    distance = sum(((values[name] - reference[name]) ** 2).sum() for name in reference)
    return float((distance / sum((r**2).sum() for r in reference.values())).sqrt())


def settings(recipe: Recipe, accumulation: int = 4, **sections: dict) -> dict:
    """The same recipe as settings of poise.Engine."""
    names = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    dtype = recipe.parameters or recipe.autocast
    precision = {
        "dtype": names[dtype],
        "parameters": names[recipe.parameters],
        "autocast": recipe.autocast is not None,
    }
    if dtype is torch.float16:
        precision["initial_loss_scale"] = recipe.loss_scale
    optimizer = {
        "type": recipe.optimizer,
        "lr": recipe.lr,
        "eps": recipe.eps,
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.max_grad_norm,
    }
    if recipe.optimizer == "sgd":
        optimizer["momentum"] = MOMENTUM
    return {
        "batch": {"micro_batch_size": 2, "accumulation": accumulation},
        "precision": precision,
        "optimizer": optimizer,
        **sections,
    }
