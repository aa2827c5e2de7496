"""The metrics of a run as JSON lines: one object a line, written at once."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class MetricsLog:
    """Writes to `path`. Infinity and NaN are written as strings: JSON has no word for them.

    Args:
      path: of the file; its folder is made.
      fresh: an old file is written anew; else lines are appended.
      echo: also gets every line.
    """

    def __init__(self, path: Path, fresh: bool = False, echo: TextIO | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open(path, "w" if fresh else "a", encoding="utf-8")
        self._echo = echo
        with path.open("rb") as file:
            self.lines = sum(1 for _ in file)

    def write(self, line: dict[str, Any]) -> None:
        text = json.dumps({key: _plain(value) for key, value in line.items()})
        self._file.write(text + "\n")
        self._file.flush()
        self.lines += 1
        if self._echo is not None:
            print(text, file=self._echo, flush=True)

    def go_on_after(self, lines: int) -> None:
        """Drops what follows the first `lines`: a resumed run writes it again.

        Through a new file that takes the old one's place, so that none of it is lost on the way.
        """
        new = self.path.with_name(self.path.name + ".new")
        with self.path.open("rb") as old, new.open("wb") as kept:
            first = list(itertools.islice(old, lines))
            kept.writelines(first)
        self._file.close()
        new.replace(self.path)
        self._file = open(self.path, "a", encoding="utf-8")
        self.lines = len(first)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class NoMetrics:
    """In place of a MetricsLog on ranks that write nothing."""

    lines = 0

    def write(self, line: dict[str, Any]) -> None:
        pass

    def go_on_after(self, lines: int) -> None:
        pass

    def __enter__(self) -> NoMetrics:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def python_values(value: Any) -> Any:
    """Numbers, texts, lists and dictionaries, which JSON has words for, of what a metric or a line may hold besides:
    numpy's and torch's numbers and arrays."""
    if isinstance(value, Mapping):
        return {name: python_values(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [python_values(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
