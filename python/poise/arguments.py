"""Arguments of a Trainer: those of transformers sorted out, and its own objects of them read."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from typing import Any

from poise._C import Error
from poise.arguments_table import OLD_NAMES, TABLE, Field, plain_value
from poise.command_line import DICTIONARIES

logger = logging.getLogger("poise")

# What the same thing is called in a run.json, in DeepSpeed and in other trainers.
ELSEWHERE = {
    "micro_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "global_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "epochs": "num_train_epochs",
    "max_updates": "max_steps",
}

COUNTS = ("warmup_steps", "logging_steps", "eval_steps", "save_steps")  # or parts of the run

FIELDS: dict[str, Field] = {field.name: field for field in TABLE}


def sort_out(given: dict[str, Any], known: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of ours, what is accepted besides); raises Error on an unknown or a refused one.

    Args:
      given: by name, old names too.
      known: fields of poise.TrainingArguments.
    """
    ours: dict[str, Any] = {}
    besides: dict[str, Any] = {}
    for name, value in given.items():
        new_name = OLD_NAMES.get(name, name)
        if new_name != name:
            if not value:  # its default, in all of them
                continue
            logger.info("[trainer] %s is called %s now", name, new_name)
        value = _read(new_name, value)
        if new_name in known:
            ours[new_name] = plain_value(value)
            continue
        field = FIELDS.get(new_name)
        if field is None:
            alike = difflib.get_close_matches(name, [*known, *FIELDS], n=1, cutoff=0.0)
            nearest = ELSEWHERE.get(name, alike[0])
            raise Error(f"[trainer] unknown argument {name}; did you mean {nearest}?")
        if field.fate == "refused" and not field.is_harmless(value):
            raise Error(f"[trainer] {name} is {plain_value(value)!r}: {field.text}; leave it out")
        if not field.is_harmless(value):
            level = logging.WARNING if field.loud else logging.INFO
            logger.log(level, "[trainer] %s: %s", name, field.text)
        besides[new_name] = value
    return ours, besides


def _read(name: str, value: Any) -> Any:
    """What a command line gives as text or as a float."""
    if name in DICTIONARIES and isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise Error(f"[trainer] {name} is no JSON: {error}; it is {value!r}") from error
    if name in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def of_transformers(args: Any) -> dict[str, Any]:
    """What was set in an object of transformers' TrainingArguments, by name: all that differs from a
    fresh object's."""
    names = [field.name for field in dataclasses.fields(args)]
    fresh = _fresh(args)
    given: dict[str, Any] = {"output_dir": args.output_dir or "trainer_output"}
    for name in names:
        value = getattr(args, name)
        if name == "output_dir" or _same(value, getattr(fresh, name, None)):
            continue
        if name in FIELDS or name in OLD_NAMES:
            given[name] = value
        # What a subclass added is its own Trainer's to read: args keeps it.
    if getattr(args, "use_cpu", False):
        given["use_cpu"] = True
    return given


def _fresh(args: Any) -> Any:
    """An object with all defaults, on the same device: some defaults depend on it."""
    on_cpu = {"use_cpu": True} if getattr(args, "use_cpu", False) else {}
    for kind in type(args).__mro__:
        try:
            return kind(output_dir=args.output_dir, **on_cpu)
        except TypeError:  # a subclass with arguments of its own
            continue
    raise Error(f"[trainer] cannot read {type(args).__name__}; give poise.TrainingArguments")


def _same(value: Any, default: Any) -> bool:
    try:
        return bool(value == default) or repr(value) == repr(default)
    except (TypeError, ValueError):
        return False
