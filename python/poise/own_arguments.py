"""The table of TrainingArguments' own fields, which transformers' class does not have, from their source."""

from __future__ import annotations

import dataclasses
import inspect
import re

from poise.arguments import FIELDS
from poise.training_arguments import _Arguments

_FIELD = re.compile(r"^    (\w+): ([^=]+?) = (?:\(\s*)?(.+?)(?:\s*\))?  # (.+)$", re.M)


def described() -> dict[str, tuple[str, str, str]]:
    """Type, default and meaning by name, of the fields of poise's own."""
    source = re.sub(r"= \(\n\s+(.+?)  # (.+)\n    \)", r"= \1  # \2", inspect.getsource(_Arguments))
    found = {name: rest for name, *rest in _FIELD.findall(source)}
    own = [f.name for f in dataclasses.fields(_Arguments) if f.name not in FIELDS]
    return {name: tuple(found[name]) for name in own}


def reference() -> str:
    """The section."""
    rows = []
    for name, (kind, default, meaning) in described().items():
        rows.append(f"| `{name}` | {kind.replace(' | ', ' or ')} | `{default}` | {meaning} |")
    return (
        "\n## Fields of poise's own\n\nWhat is offloaded goes to `host` or `file`; `none` stays.\n\n| field | type | default | |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
