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
ABSOLUTE = ("min_lr", "lr_end")
POLYNOMIAL_END = 1e-7  # transformers' default


def updates_of(value: float, total: int) -> int:
    """A number of updates, or in (0, 1) that part of the run, rounded up."""
    return math.ceil(value * total) if 0 < value < 1 else int(value)


def check(args: TrainingArguments) -> None:
    """Raises poise.Error on a schedule, or a setting of one, that is not known."""
    choices.check("lr_scheduler_type", args.lr_scheduler_type, TYPES)
    if args.warmup_steps < 0:
        raise Error(
            f"[trainer] warmup_steps is {args.warmup_steps}; give updates, or a part in (0, 1)"
        )
    if args.lr_scheduler_type == "constant" and args.warmup_steps:
        raise Error("[trainer] warmup_steps with a constant schedule; use constant_with_warmup")
    settings = KWARGS.get(args.lr_scheduler_type, {})
    for name in args.lr_scheduler_kwargs or {}:
        if name not in settings:
            known = ", ".join(settings) or "none"
            raise Error(
                f"[trainer] lr_scheduler_kwargs has {name!r}; {args.lr_scheduler_type} knows "
                f"{known}"
            )


def to_schedule(args: TrainingArguments, total_updates: int) -> dict[str, Any]:
    """The schedule section of a Config."""
    kind = args.lr_scheduler_type
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
