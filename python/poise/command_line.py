"""Fields of arguments as transformers.HfArgumentParser reads them from a dataclass: each of a type that one argument
of a command line can have, and with them all that transformers' TrainingArguments has."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from poise.arguments_table import OLD_NAMES, TABLE

LISTS = ("report_to", "label_names", "include_for_metrics")
DICTIONARIES = (  # written as JSON
    "accelerator_config", "activation_checkpointing_kwargs", "checkpointing", "fsdp_config",
    "gradient_checkpointing_kwargs", "lr_scheduler_kwargs",
)  # fmt: skip


def describe(kind: type, own: dict[str, tuple[Any, Any]]) -> None:
    """Lets dataclasses.fields() and type hints of a class tell them.

    Args:
      kind: gets them; what its bases tell stays.
      own: type and default by name.
    """
    made = dataclasses.make_dataclass(
        "Described",
        [
            (name, type_, dataclasses.field(default=default, metadata={"help": _help(name)}))
            for name, (type_, default) in own.items()
        ],
    )
    before = getattr(kind, "__dataclass_fields__", {})
    kind.__dataclass_fields__ = {**before, **made.__dataclass_fields__}
    kind.__annotations__ = {**kind.__dict__.get("__annotations__", {}), **made.__annotations__}


def with_transformers(ours: type) -> dict[str, tuple[Any, Any]]:
    """Types and defaults of a dataclass' fields, and of those that only transformers' class has."""
    hints = typing.get_type_hints(ours)
    found = {f.name: (_one(f.name, hints[f.name]), f.default) for f in dataclasses.fields(ours)}
    for field in TABLE:
        if field.name not in found and not field.name.startswith("_"):
            default = None if field.name in LISTS else field.default
            found[field.name] = (_one(field.name, _type_of(default)), default)
    for old, new in OLD_NAMES.items():
        found[old] = (_optional(found[new][0]), None)
    return found


def _one(name: str, hint: Any) -> Any:
    """A type that one argument can have."""
    if name in LISTS:
        return list[str] | None
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds:
        kind: Any = float
    else:
        kind = next((one for one in (int, bool) if one in kinds and str not in kinds), str)
    return _optional(kind) if type(None) in kinds or hint is Any else kind


def _optional(kind: Any) -> Any:
    return kind if type(None) in typing.get_args(kind) else kind | None


def _type_of(default: Any) -> Any:
    return str | None if default is None else type(default)


def _help(name: str) -> str:
    """The row of the table."""
    text = next((field.text for field in TABLE if field.name == name), "")
    if name in OLD_NAMES:
        text = f"the older name of {OLD_NAMES[name]}"
    return text.replace("%", "%%")
