"""Values that an argument may have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from poise._C import Error


def check(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises poise.Error on a value that is none of these, with the nearest one where one is near."""
    allowed = list(allowed)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), map(str, allowed), n=1, cutoff=0.75)
    meant = f"did you mean {near[0]}? There are" if near else "use"
    raise Error(f"[trainer] {name} is {value!r}; {meant} {', '.join(map(str, allowed))}")
