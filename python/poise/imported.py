"""Calls "module:function" of a run file: the model, and the datasets where it brings its own."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from poise._C import Error

RESULT = (
    "return a torch.nn.Module, or (module, train_dataset) or (module, train_dataset, eval_dataset)"
)


class Imported(NamedTuple):
    """What the function returned; train_dataset None: the byte corpus of the file's data section."""

    model: nn.Module
    train_dataset: Any = None
    eval_dataset: Any = None


def load(name: str, arguments: dict[str, Any], folder: Path) -> Imported:
    """Imports the function and calls it. An exception of its own keeps its type.

    Args:
      name: "module:function", both by their importable names.
      arguments: keywords for the function.
      folder: of the run file; modules beside it are found.
    """
    module_name, function_name = _parts(name)
    where = str(folder.resolve())
    if where not in sys.path:
        sys.path.insert(0, where)
    function = _function(_module(module_name, where), function_name, name)
    _check_arguments(function, arguments, name)
    return _result(function(**arguments), name)


def _parts(name: Any) -> tuple[str, str]:
    parts = name.split(":") if isinstance(name, str) else []
    if len(parts) == 2 and all(n.isidentifier() for part in parts for n in part.split(".")):
        return parts[0], parts[1]
    raise Error(
        f'[cli] model.import is {name!r}; write "module:function", for example "nets:build"'
    )


def _module(name: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another name is missing inside the module: its own trouble, with its own traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise Error(
            f"[cli] model.import: there is no module {name}; it is looked for beside the run file "
            f"({where}) and on Python's path"
        ) from None


def _function(module: Any, name: str, whole: str) -> Callable[..., Any]:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)[:3]
            advice = f"did you mean {' or '.join(near)}?" if near else "it has no function"
            raise Error(f"[cli] model.import {whole}: no {name} in {module.__name__}; {advice}")
        found = getattr(found, part)
    if not callable(found):
        raise Error(
            f"[cli] model.import {whole}: {name} is {type(found).__name__}, no function; {RESULT} "
            "from one"
        )
    return found


def _check_arguments(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # not told: the call itself will say
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise Error(
            f"[cli] model.import {name} does not take the keys of model: {error}; its arguments "
            f"are {signature}"
        ) from None


def _result(result: Any, name: str) -> Imported:
    parts = result if isinstance(result, tuple) else (result,)
    if 1 <= len(parts) <= 3 and isinstance(parts[0], nn.Module):
        made = Imported(*parts)
        if made.train_dataset is None and made.eval_dataset is not None:
            raise Error(
                f"[cli] model.import {name} returned an eval_dataset without a train_dataset; "
                "return both, or name data.validation in the file"
            )
        return made
    described = ", ".join(type(part).__name__ for part in parts)
    shown = f"({described})" if isinstance(result, tuple) else described
    raise Error(f"[cli] model.import {name} returned {shown}; {RESULT}")
