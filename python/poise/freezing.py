"""Parameters that callbacks freeze and free again while a run goes on, as with an optimizer of torch: while
one is frozen its value, its moments and the number of its updates stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from poise import _C
from poise._C import StepResult
from poise.config import read_config
from poise.engine import Engine

KINDS = ("adamw", "adam", "sgd")  # whose correction for a late start is known


class Freezing:
    """Of one run. What was frozen when the engine was made stays so: it has no state there.

    Nothing is done until the first change; from then on rates and decay are given to the engine by
    groups. A parameter that begins late gets the rate that makes its update that of a young Adam, whose
    moments are corrected by its own number of updates.

    Args:
      engine: of the run.
      config: its settings.
      begins: updates that it had applied before the run.
    """

    def __init__(self, engine: Engine, config: dict[str, Any], begins: int) -> None:
        self._engine, self._begins = engine, begins
        self._config, self._optimizer = read_config(config), config["optimizer"]
        self._trained = {n: p for n, p in engine.model.named_parameters() if p.requires_grad}
        self._asleep: dict[str, list[torch.Tensor]] = {}  # moments of those that are frozen now
        self._missed = dict.fromkeys(self._trained, 0)  # updates
        self._groups: list[tuple[bool, int, bool]] = []  # decays, missed, frozen
        self.active = False

    @staticmethod
    def is_possible(engine: Engine, config: dict[str, Any]) -> bool:
        """Not where parameters are sharded or offloaded, nor with other groups and optimizers."""
        optimizer = config["optimizer"]
        known = optimizer["type"] in KINDS and not optimizer.get("groups")
        return known and not engine.shards_parameters()

    def before_update(self) -> None:
        """All ranks; callbacks must do the same on each."""
        frozen = {name for name, p in self._trained.items() if not p.requires_grad}
        if frozen != self._asleep.keys():
            self._change(frozen)
        if self.active:
            self._give_settings()

    def after_update(self, result: StepResult) -> None:
        if result.applied:
            for name in self._asleep:
                self._missed[name] += 1

    def _change(self, frozen: set[str]) -> None:
        for name in self._asleep.keys() - frozen:
            self._engine.set_moments(name, self._asleep.pop(name))
        for name in sorted(frozen - self._asleep.keys()):
            self._asleep[name] = [m.clone() for m in self._engine.moments(name)]
        self._engine.expect_frozen(self._trained[name] for name in frozen)
        groups: dict[tuple[bool, int, bool], list[str]] = {}
        for name, parameter in self._trained.items():
            # Those that are frozen make one group: how many updates they miss is not known yet.
            missed = 0 if name in frozen else self._missed[name]
            key = (self._decays(parameter), missed, name in frozen)
            groups.setdefault(key, []).append(name)
        # The first one is empty: its rate is that of the schedule, which is shown.
        self._groups = [(False, 0, False), *groups]
        self._engine.group_parameters([[], *groups.values()])
        self.active = True

    def _decays(self, parameter: nn.Parameter) -> bool:
        return self._optimizer.get("decay_rule", "matrices") == "all" or parameter.dim() >= 2

    def _give_settings(self) -> None:
        policy = self._optimizer
        applied = self._engine.updates - self._begins
        rate = policy["lr"] * _C.schedule_multiplier(self._config, applied)
        settings = []
        for decays, missed, frozen in self._groups:
            decay = policy["weight_decay"] if decays else 0.0
            settings.append((0.0, 0.0) if frozen else self._late(rate, decay, missed))
        constants = {k: policy[k] for k in ("beta1", "beta2", "eps", "momentum") if k in policy}
        self._engine.set_hyperparameters(settings, **constants)

    def _late(self, rate: float, decay: float, missed: int) -> tuple[float, float]:
        """(rate, decay) of parameters that missed so many updates."""
        kind = self._optimizer["type"]
        if kind == "sgd" or missed == 0 or rate == 0:
            return rate, decay
        whole = self._engine.updates + 1
        b1, b2 = self._optimizer["beta1"], self._optimizer["beta2"]
        own = whole - missed
        factor = (1 - b1**whole) / (1 - b1**own) * ((1 - b2**own) / (1 - b2**whole)) ** 0.5
        return rate * factor, decay / factor if kind == "adamw" else decay
