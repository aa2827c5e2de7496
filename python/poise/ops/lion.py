"""Lion by DeepSpeed's names; poise.initialize gives its work to the engine's kernel."""

from __future__ import annotations

from typing import Any

from poise._C import Error
from poise.optimizers import Lion


class FusedLion(Lion):
    """Lion with DeepSpeed's values where none are given."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, tuple(betas), weight_decay)


class DeepSpeedCPULion(FusedLion):
    """The same."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise Error("[deepspeed] fp32_optimizer_states=False: moments are fp32")
        super().__init__(model_params, lr, betas, weight_decay)
