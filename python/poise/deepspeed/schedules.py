"""DeepSpeed's learning rate schedules, as functions of the number of applied updates.

Each sets the rates of an optimizer's groups: at once those of the first update, with every step()
those of the next one. After the n-th step the count is n - 1, as in DeepSpeed, so that rates agree
update by update.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from poise._C import Error


class Schedule:
    """What the schedules share: `rates(count)` is all they differ in.

    Attributes:
      last_batch_iteration: steps made, less one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._set(self.first_rates())

    def rates(self, count: int) -> list[float]:
        """Of each group, after step count + 1."""
        raise NotImplementedError

    def first_rates(self) -> list[float]:
        """Of the first update."""
        return self.rates(0)

    def momenta(self, count: int) -> float | None:
        """beta1 after step count + 1; None: it stays."""
        return None

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        count = self.last_batch_iteration
        return self.first_rates() if count < 0 else self.rates(count)

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        self._set(self.get_lr())
        momentum = self.momenta(max(self.last_batch_iteration, 0))
        if momentum is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = (momentum, group["betas"][1])

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _of_groups(self, value: Any, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
        if len(values) != groups:
            raise Error(
                f"[deepspeed] scheduler.params.{name} has {len(values)} values for {groups} groups"
            )
        return [float(v) for v in values]


class WarmupLR(Schedule):
    """From warmup_min_lr to warmup_max_lr, by the logarithm of the count or in a line; then flat."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self._steps, self._type = _warmup(warmup_num_steps, warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = float(optimizer.param_groups[0]["lr"])
        self._low = self._of_groups(warmup_min_lr, "warmup_min_lr")
        self._high = self._of_groups(warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration)

    def first_rates(self) -> list[float]:
        return self._low

    def rates(self, count: int) -> list[float]:
        part = _risen(count, self._steps, self._type) if count < self._steps else self.after(count)
        return [low + (high - low) * part for low, high in zip(self._low, self._high, strict=True)]

    def after(self, count: int) -> float:
        """The part of the way up that is kept when the warmup is over."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """The same, then down to warmup_min_lr in a line that ends at total_num_steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def after(self, count: int) -> float:
        return max(0.0, (self._total - count) / max(1.0, self._total - self._steps))


class WarmupCosineLR(Schedule):
    """Parts of the optimizer's own rates: up from warmup_min_ratio, then by a cosine to cos_min_ratio."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._steps, self._type = _warmup(warmup_num_steps, warmup_type)
        self._total, self._low, self._floor = total_num_steps, warmup_min_ratio, cos_min_ratio
        self._own = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def first_rates(self) -> list[float]:
        return [0.0 for _ in self._own]

    def rates(self, count: int) -> list[float]:
        if count < self._steps:
            ratio = self._low + (1 - self._low) * _risen(count, self._steps, self._type)
        else:
            done = (count - self._steps + 1) / max(1, self._total - self._steps)
            half_wave = (1 + math.cos(math.pi * min(1.0, done))) / 2
            ratio = self._floor + (1 - self._floor) * half_wave
        return [rate * ratio for rate in self._own]


class LRRangeTest(Schedule):
    """Rates that rise without end, to find the largest that still trains (Smith, arXiv:1803.09820)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self._low = self._of_groups(lr_range_test_min_lr, "lr_range_test_min_lr")
        self._size, self._rate = lr_range_test_step_size, lr_range_test_step_rate
        self._stairs = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def first_rates(self) -> list[float]:
        return self._low

    def rates(self, count: int) -> list[float]:
        done = (count + 1) / self._size
        done = math.floor(done) if self._stairs else done
        return [low * (1 + self._rate * done) for low in self._low]


class OneCycle(Schedule):
    """Up and down once, beta1 the other way, then a decay (Smith, arXiv:1803.09820)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self._up, self._down = cycle_first_step_size, second
        stairs = (
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count
        )
        self._stairs = (cycle_first_stair_count, stairs)
        self._low, self._high = cycle_min_lr, cycle_max_lr
        self._decay = (decay_lr_rate, decay_step_size)
        cycles = cycle_momentum and "betas" in optimizer.param_groups[0]
        self._momenta = (cycle_min_mom, cycle_max_mom) if cycles else None
        self._momentum_decay = (decay_mom_rate, decay_step_size)
        if cycles and last_batch_iteration == -1:
            for group in optimizer.param_groups:
                group["betas"] = (cycle_min_mom, 0.99)
        super().__init__(optimizer, last_batch_iteration)

    def first_rates(self) -> list[float]:
        return [float(self._low)] * len(self.optimizer.param_groups)

    def rates(self, count: int) -> list[float]:
        if count < self._up + self._down:
            rate = self._low + (self._high - self._low) * self._height(count + 1)
        else:
            rate = self._low / self._decayed(count, *self._decay)
        return [rate] * len(self.optimizer.param_groups)

    def momenta(self, count: int) -> float | None:
        if self._momenta is None or self.last_batch_iteration < 0:
            return None
        low, high = self._momenta
        if count < self._up + self._down:
            return high - (high - low) * self._height(count + 1)
        return high * self._decayed(count, *self._momentum_decay)

    def _height(self, position: int) -> float:
        """From 0 at the ends of the cycle to 1 at its top."""
        place = position % (self._up + self._down)
        rises = place <= self._up
        height = place / self._up if rises else (self._up + self._down - place) / self._down
        stairs = self._stairs[0 if rises else 1]
        return math.floor(height * stairs + 1e-9) / stairs if stairs > 0 else height

    def _decayed(self, count: int, rate: float, size: int) -> float:
        if size == 0 or rate == 0:
            return 1.0
        return 1 + rate * (count - self._up - self._down + 1) / size


SCHEDULES = {
    one.__name__: one for one in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def make(kind: str, optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> Schedule:
    """The schedule of a file; raises Error on a type or a setting that is not known."""
    if kind not in SCHEDULES:
        raise Error(f"[deepspeed] scheduler.type is {kind!r}; use {', '.join(SCHEDULES)}")
    try:
        inspect.signature(SCHEDULES[kind]).bind(optimizer, **params)
    except TypeError as error:
        raise Error(f"[deepspeed] scheduler.params do not fit {kind}: {error}") from None
    return SCHEDULES[kind](optimizer, **params)


def _warmup(steps: Any, kind: str) -> tuple[int, str]:
    if not isinstance(steps, int) or steps < 0:
        raise Error(f"[deepspeed] scheduler.params.warmup_num_steps is {steps!r}; give 0 or more")
    if kind not in ("log", "linear"):
        raise Error(f"[deepspeed] scheduler.params.warmup_type is {kind!r}; use log or linear")
    return max(2, steps), kind


def _risen(count: int, steps: int, kind: str) -> float:
    return math.log(count + 1) / math.log(steps) if kind == "log" else count / steps
