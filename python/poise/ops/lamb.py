"""Lamb by DeepSpeed's name; poise.initialize gives its work to the engine's kernel."""

from __future__ import annotations

from typing import Any

from poise._C import Error
from poise.optimizers import Lamb


class FusedLamb(Lamb):
    """Lamb with DeepSpeed's values where none are given."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if not bias_correction or eps_inside_sqrt or amsgrad:
            raise Error(
                f"[deepspeed] FusedLamb(bias_correction={bias_correction}, eps_inside_sqrt="
                f"{eps_inside_sqrt}, amsgrad={amsgrad}): moments are corrected, eps is added to the "
                "root, and there is no amsgrad; leave these out"
            )
        if max_grad_norm:
            raise Error(
                f"[deepspeed] FusedLamb(max_grad_norm={max_grad_norm}): say gradient_clipping in the "
                "settings, which clips the same norm"
            )
        super().__init__(params, lr, tuple(betas), eps, weight_decay, min_coeff, max_coeff)
