"""transformers' names and settings of learning rate schedules, made poise's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from poise import choices
from poise._C import Error

if TYPE_CHECKING:
    from poise.training_arguments import TrainingArguments

TYPES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine_with_min_lr",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
}
# Setting of transformers: ours. A learning rate becomes a part of the peak.
KWARGS = {
    "cosine_with_min_lr": {"min_lr": "min_lr_ratio", "min_lr_rate": "min_lr_ratio"},
    "warmup_stable_decay": {"num_decay_steps": "decay_updates", "min_lr_ratio": "min_lr_ratio"},
    "polynomial": {"power": "power", "lr_end": "min_lr_ratio"},
}
# What transformers makes, as a scheduler of torch: its further names, and its further settings of the others.
# None: it says itself which there are.
THEIRS: dict[str, tuple[str, ...] | None] = {
    "cosine_with_restarts": ("num_cycles",),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "reduce_lr_on_plateau": None,
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles",),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_stable_steps", "warmup_type", "decay_type", "num_cycles"),
}
ABSOLUTE = ("min_lr", "lr_end")
POLYNOMIAL_END = 1e-7  # transformers' default


def updates_of(value: float, total: int) -> int:
    """A number of updates, or in (0, 1) that part of the run, rounded up."""
    return math.ceil(value * total) if 0 < value < 1 else int(value)


def check(args: TrainingArguments) -> None:
    """Raises poise.Error on a schedule, or a setting of one, that is not known."""
    kind = args.lr_scheduler_type
    choices.check(
        "lr_scheduler_type", kind, [*TYPES, *(name for name in THEIRS if name not in TYPES)]
    )
    if args.warmup_steps < 0:
        raise Error(
            f"[trainer] warmup_steps is {args.warmup_steps}; give updates, or a part in (0, 1)"
        )
    if args.lr_scheduler_type == "constant" and args.warmup_steps:
        raise Error("[trainer] warmup_steps with a constant schedule; use constant_with_warmup")
    if kind == "reduce_lr_on_plateau" and args.eval_strategy == "no":
        raise Error(
            "[trainer] lr_scheduler_type reduce_lr_on_plateau with eval_strategy no: it watches a metric; set "
            "eval_strategy to steps or epoch"
        )
    theirs = THEIRS.get(kind, ())
    settings = [*KWARGS.get(kind, {}), *(theirs or ())]
    for name in args.lr_scheduler_kwargs or {}:
        if name not in settings and theirs is not None:
            known = ", ".join(settings) or "none"
            raise Error(f"[trainer] lr_scheduler_kwargs has {name!r}; {kind} knows {known}")


def is_theirs(args: TrainingArguments) -> bool:
    """Whether transformers makes the schedule, which is no shape of the engine's."""
    if args.lr_scheduler_type not in TYPES:
        return True
    ours = KWARGS.get(args.lr_scheduler_type, {})
    return any(name not in ours for name in args.lr_scheduler_kwargs or {})


def made_by_transformers(optimizer: Any, args: TrainingArguments, updates: int) -> Any:
    """The scheduler, of torch, over the optimizer's rates."""
    try:
        from transformers import get_scheduler
    except ImportError as error:
        raise Error(
            f"[trainer] lr_scheduler_type {args.lr_scheduler_type} with lr_scheduler_kwargs "
            f"{args.lr_scheduler_kwargs} is made by transformers, which cannot be imported here: pip install "
            "transformers, or give a scheduler in optimizers="
        ) from error
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=updates_of(args.warmup_steps, updates),
        num_training_steps=updates,
        scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
    )


def to_schedule(args: TrainingArguments, total_updates: int) -> dict[str, Any]:
    """The schedule section of a Config."""
    kind = args.lr_scheduler_type
    if is_theirs(args):  # steps over the engine's rates
        return {"type": "constant", "total_updates": total_updates}
    schedule: dict[str, Any] = {
        "type": TYPES[kind],
        "warmup_updates": updates_of(args.warmup_steps, total_updates),
        "total_updates": total_updates,
    }
    kwargs = dict(args.lr_scheduler_kwargs or {})
    if kind == "polynomial":
        kwargs.setdefault("lr_end", POLYNOMIAL_END)
    for name, value in kwargs.items():
        schedule[KWARGS[kind][name]] = value / args.learning_rate if name in ABSOLUTE else value
    return schedule
