"""Adam by DeepSpeed's names; poise.initialize and poise.wrap give its work to the engine's kernels."""

from __future__ import annotations

from typing import Any

import torch

from poise._C import Error


class FusedAdam(torch.optim.AdamW):
    """AdamW; with adam_w_mode=False decay is added to the gradient, as in torch.optim.Adam."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise Error("[deepspeed] bias_correction=False: Adam's moments are always corrected")
        super().__init__(params, lr, tuple(betas), eps, weight_decay, amsgrad)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode


class DeepSpeedCPUAdam(FusedAdam):
    """The same: on the CPU the kernel is compiled per instruction set and chosen at run time."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise Error("[deepspeed] fp32_optimizer_states=False: moments are fp32")
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )
