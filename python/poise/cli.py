"""The command `poise` from pip: the C++ command line, plus the commands that need Python."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Command -> module whose main(arguments) runs it. Everything else is the C++ command line's.
_PYTHON_COMMANDS = {"bench": "poise.bench", "demo": "poise.demo"}


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in _PYTHON_COMMANDS:
        module = importlib.import_module(_PYTHON_COMMANDS[arguments[0]])
        return int(module.main(arguments[1:]) or 0)
    from poise import _C

    status = int(_C.cli_run(["poise", *arguments]))
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\nWith the Python package also:\n  bench  measures the figures of the README")
        print("  demo   trains a small model several ways and writes a report")
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; an Error becomes one line on standard error."""
    from poise import Error

    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except Error as error:
        print(f"poise: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
