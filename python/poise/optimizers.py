"""Optimizers that torch does not have, as torch's classes: they run by themselves, and an engine takes
them over as it takes torch's own (poise.wrap, DeepSpeed's names)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from poise._C import Error


class _Optimizer(torch.optim.Optimizer):
    """A step over all parameters that have a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, parameter in self._with_gradient():
            self._update(parameter, parameter.grad.to(parameter.dtype), group)
        return loss

    def _with_gradient(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        for group in self.param_groups:
            yield from ((group, p) for p in group["params"] if p.grad is not None)

    def _update(self, value: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_Optimizer):
    """The sign of a blend of momentum and gradient is the step (Chen et al. 2023, arXiv:2302.06675).

    Args:
      params: tensors, or groups of them.
      lr: a third to a tenth of AdamW's.
      betas: of the blend, and of the momentum that stays.
      weight_decay: decoupled, as AdamW's; three to ten times its.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _update(self, value: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[value]
        if not state:
            state["exp_avg"] = torch.zeros_like(value)
        momentum = state["exp_avg"]
        beta1, beta2 = group["betas"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        value.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)


class Lamb(_Optimizer):
    """Adam whose step in each parameter is as long as the parameter's norm says (You et al. 2019,
    arXiv:1904.00962).

    Args:
      params: tensors, or groups of them.
      lr: the length of a step over that of the weights.
      betas, eps: as Adam's.
      weight_decay: added to Adam's direction before its norm is taken.
      min_coeff, max_coeff: limits of the ratio of the norms; 0 for the second one: none.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        min_coeff: float = 0.0,
        max_coeff: float = 0.0,
    ) -> None:
        check_betas(betas)
        options = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "min_coeff": min_coeff, "max_coeff": max_coeff})

    def _update(self, value: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[value]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].lerp_(gradient * gradient, 1 - beta2)
        step = float(state["step"])
        root = (second / (1 - beta2**step)).sqrt_()
        direction = first / (1 - beta1**step) / (root + group["eps"])
        direction.add_(value, alpha=group["weight_decay"])
        weights, length = float(value.norm()), float(direction.norm())
        trust = 1.0
        if weights > 0 and length > 0:
            trust = weights / length
            if group["max_coeff"] > 0:
                trust = min(trust, group["max_coeff"])
            trust = max(trust, group["min_coeff"])
        value.add_(direction, alpha=-group["lr"] * trust)


class Lars(_Optimizer):
    """Momentum with a rate of its own for each matrix (You et al. 2017, arXiv:1708.03888).

    Args:
      params: tensors, or groups of them; those of less than two dimensions take the rate as it is.
      lr: the global rate.
      momentum: over steps, the rate included.
      weight_decay: added to the gradient.
      trust_coefficient: a matrix's rate over the norm of its weights by that of its gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**options, "trust_coefficient": trust_coefficient})

    def _update(self, value: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, decay = self.state[value], group["weight_decay"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(value)
        rate = group["lr"]
        weights = float(value.norm())
        length = float(gradient.norm()) + decay * weights
        if value.dim() >= 2 and weights > 0 and length > 0:
            rate *= group["trust_coefficient"] * weights / length
        momentum = state["momentum_buffer"].mul_(group["momentum"])
        momentum.add_(gradient.add(value, alpha=decay), alpha=rate)
        value.sub_(momentum)


def check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise Error(f"[optim] betas are {tuple(betas)}; give two numbers in [0, 1)")
