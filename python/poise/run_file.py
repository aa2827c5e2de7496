"""A run file whose model comes from Python: settings for the core, and arguments for a function.

    "model": {"import": "module:function", "layers": 4}

All other sections mean what they mean to the C++ command line, which reads every file without
model.import.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poise._C import Config, Error

MAX_BYTES = 1 << 20  # as the core reads
# Strings are matched first, so that what looks like a comment inside one stays.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class RunFile:
    """What a run file with model.import says.

    Attributes:
      path: of the file.
      config: every section; of `model` only sequence_length, which byte corpora are cut by.
      function: "module:function".
      arguments: the other keys of `model`.
      given: keys that the file or a setting names, such as "data.train".
    """

    path: Path
    config: Config
    function: str
    arguments: dict[str, Any]
    given: frozenset[str]


def read(path: str | Path, overrides: Sequence[str] = ()) -> RunFile | None:
    """Reads a file with model.import.

    Args:
      path: of the run file.
      overrides: "key=value" each, as --set takes them.

    Returns:
      None for a file without model.import, or one that cannot be read: the C++ command line trains
      the one and says what is wrong with the other.
    """
    document = _parse(Path(path))
    if document is None:
        return None
    model = document.get("model", {})
    if not isinstance(model, dict):
        return None
    model, settings = dict(model), list(overrides)
    for setting in overrides:
        key, equals, value = setting.partition("=")
        if equals and key.startswith("model."):
            model[key.removeprefix("model.")] = _json_or_text(value)
            settings.remove(setting)
    if "import" not in model:
        return None
    function = model.pop("import")
    if "builtin" in model:
        raise Error(
            f"[cli] model has builtin {json.dumps(model['builtin'])} and import "
            f"{json.dumps(function)}; keep one of them"
        )
    sections = {**document, "model": _core_part(model)}
    config = Config.from_json(json.dumps(sections), settings, str(path))
    return RunFile(Path(path), config, function, model, _keys(document, overrides))


def without_comments(text: str) -> str:
    """The text without // and /* */ comments."""
    return _STRING_OR_COMMENT.sub(lambda m: m[0] if m[0].startswith('"') else " ", text)


def _parse(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        document = json.loads(
            without_comments(text.decode("utf-8-sig")), object_pairs_hook=_no_key_twice
        )
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and len(text) <= MAX_BYTES else None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key comes twice")
    return made


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _core_part(model: dict[str, Any]) -> dict[str, Any]:
    return {key: model[key] for key in ("sequence_length",) if key in model}


def _keys(document: dict[str, Any], overrides: Sequence[str]) -> frozenset[str]:
    sections = ((name, body) for name, body in document.items() if isinstance(body, dict))
    inside = {f"{section}.{key}" for section, body in sections for key in body}
    return frozenset(inside | {setting.partition("=")[0] for setting in overrides})
