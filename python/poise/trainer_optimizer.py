"""A Trainer's torch optimizer and scheduler, where somebody gave or made one: the engine does their
work, and they keep groups, settings and rates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poise import _C, loop_state, optimizers, torch_optimizer, torch_settings
from poise._C import Error, StepResult
from poise.config import read_config
from poise.schedule_arguments import is_theirs, made_by_transformers, to_schedule

if TYPE_CHECKING:
    from poise.engine import Engine
    from poise.training_arguments import TrainingArguments

_KEY = "schedule"  # of a checkpoint's texts


class TorchOptimizer:
    """Goes with one run.

    Args:
      optimizer: torch's AdamW, Adam or SGD, or one of poise.optimizers, over parameters of the model.
      scheduler: steps after every applied update; None: rates stay.
    """

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Error(
                f"[trainer] the optimizer is {type(optimizer).__name__}; give torch.optim.AdamW, "
                "Adam or SGD, or none: then optim and learning_rate say it"
            )
        self._optimizer, self._scheduler = optimizer, scheduler
        self._watches = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._tie: torch_optimizer.HandedOver | None = None

    def settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """The engine's settings with this optimizer in place of the arguments' own."""
        optimizer = torch_settings.to_settings(self._optimizer)
        kept = {"max_grad_norm": config["optimizer"]["max_grad_norm"]}
        if optimizer["type"] in ("adam", "adamw"):
            kept["moments"] = config["optimizer"]["moments"]
        return {
            **config,
            "optimizer": {**optimizer, **kept},
            "schedule": {"type": "constant"},
        }

    def attach(self, engine: Engine) -> None:
        self._tie = torch_optimizer.HandedOver(self._optimizer, engine, _steps_itself)

    def kept(self) -> dict[str, str]:
        """What a checkpoint has of the schedule: what a plateau has seen; others follow from the updates."""
        if not self._watches:
            return {}
        return {_KEY: loop_state.text(self._optimizer, [self._scheduler], {})}

    def resume(self, applied: int, kept: Mapping[str, str]) -> None:
        """After a checkpoint of so many applied updates was loaded, with these texts: the schedule gets there."""
        if self._watches:
            if _KEY not in kept:
                raise Error(
                    "[trainer] the checkpoint was made without ReduceLROnPlateau, so that it has nothing of "
                    "what that has seen; resume with the scheduler that it was made with, or begin a new run"
                )
            loop_state.take(kept[_KEY], self._optimizer, [self._scheduler])
            return
        if applied == 0 or self._scheduler is None:
            return
        with warnings.catch_warnings():  # of torch, that no optimizer.step() came before
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(applied):
                self._scheduler.step()

    def before_update(self) -> None:
        self._tie.before_update()

    def after_update(self, result: StepResult) -> None:
        self._tie.after_update(result)
        if result.applied and self._scheduler is not None and not self._watches:
            self._scheduler.step()

    def after_evaluation(self, metrics: dict[str, float], metric: str) -> None:
        """ReduceLROnPlateau watches an evaluation's metric."""
        if self._watches:
            name = metric if metric in metrics else f"eval_{metric}"
            if name not in metrics:
                raise Error(
                    f"[trainer] ReduceLROnPlateau watches {metric!r}, but an evaluation gave "
                    f"{', '.join(metrics)}; set metric_for_best_model to one of these"
                )
            self._scheduler.step(metrics[name])


def adamw(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """What the arguments say, as an optimizer of torch: decay for matrices alone."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    made, settings = class_and_settings(args)
    return made(groups, **settings)


def class_and_settings(args: TrainingArguments) -> tuple[type, dict[str, Any]]:
    """The class of what args.optim means, and its arguments but for decay."""
    kind = args.engine_optimizer
    settings: dict[str, Any] = {"lr": args.learning_rate}
    betas = (args.adam_beta1, args.adam_beta2)
    if kind == "sgd":
        return torch.optim.SGD, settings
    if kind == "adafactor":
        raise Error(
            "[trainer] create_optimizer() with optim adafactor, which has no class of torch; leave it to "
            "the Trainer, or override create_optimizer()"
        )
    if kind == "lars":
        return optimizers.Lars, settings
    if kind == "lion":
        return optimizers.Lion, {**settings, "betas": betas}
    settings |= {"betas": betas, "eps": args.adam_epsilon}
    if kind == "lamb":
        return optimizers.Lamb, settings
    return (torch.optim.Adam if kind == "adam" else torch.optim.AdamW), settings


def scheduler(
    optimizer: torch.optim.Optimizer, args: TrainingArguments, updates: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule that the arguments say, over the optimizer's own rates."""
    if is_theirs(args):
        return made_by_transformers(optimizer, args, updates)
    config = read_config({"schedule": to_schedule(args, updates)})
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda applied: _C.schedule_multiplier(config, applied)
    )


def _steps_itself() -> None:
    raise Error("[trainer] optimizer.step() in a Trainer's run; the Trainer makes the updates")
