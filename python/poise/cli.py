"""The command `poise` from pip: the C++ command line, plus the commands that need Python."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence

# Command -> module whose main(arguments) runs it. Everything else is the C++ command line's.
_PYTHON_COMMANDS = {"bench": "poise.bench", "demo": "poise.demo"}
_TRAIN_IMPORTED = "poise.train_imported"  # `train` with {"model": {"import": "module:function"}}


def _imports_its_model(arguments: Sequence[str]) -> bool:
    """Whether this is `train` of a run file whose model is a Python function."""
    if not arguments or arguments[0] != "train":
        return False
    files = [argument for argument in arguments[1:] if argument.endswith(".json")]
    try:
        with open(files[0], encoding="utf-8") as file:
            model = json.load(file).get("model")
    except (IndexError, OSError, ValueError, AttributeError):
        return False  # the C++ command line reads it again, and says what is wrong
    return isinstance(model, dict) and "import" in model


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in _PYTHON_COMMANDS:
        module = importlib.import_module(_PYTHON_COMMANDS[arguments[0]])
        return int(module.main(arguments[1:]) or 0)
    if _imports_its_model(arguments):
        module = importlib.import_module(_TRAIN_IMPORTED)
        return int(module.main(arguments[1:]) or 0)
    from poise import _C

    return int(_C.cli_run(["poise", *arguments]))


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
