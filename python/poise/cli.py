"""The command `poise` from pip: the C++ command line, plus what needs Python."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

# Command -> (module whose main(arguments) runs it, sentence of the help). Everything else is the
# C++ command line's, except `train` with a model of Python.
_PYTHON_COMMANDS = {
    "bench": ("poise.bench", "Measure what the README claims"),
    "report": ("poise.report", "Write a page of a run's curves, memory and events"),
    "demo": ("poise.demo", "Train a small model several ways and write a report"),
}
_HELP = ("-h", "--help")
_COLUMN = 30  # where sentences begin in the C++ command line's help


READER_GONE = 141  # as a shell says it of a program that SIGPIPE has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; an Error becomes one line on standard error. Where
    nobody reads standard output any more (`poise bench | head`) the command ends without a word."""
    try:
        try:
            return _status(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if _is_read(sys.stdout):
            raise  # another pipe than that
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def _is_read(stream: TextIO) -> bool:
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except OSError:  # no file: it is kept in memory
        return True
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _status(arguments: list[str]) -> int:
    import torch

    from poise import Error

    try:
        return _run(arguments)
    except (Error, torch.OutOfMemoryError) as error:
        sys.stdout.flush()
        print(f"poise: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command in _PYTHON_COMMANDS:
        module = importlib.import_module(_PYTHON_COMMANDS[command][0])
        return int(module.main(arguments[1:]) or 0)
    if command == "train":
        status = _train(arguments[1:])
        if status is not None:
            return status
    if command == "plan":
        status = _plan(arguments[1:])
        if status is not None:
            return status
    from poise import _C

    status = int(_C.cli_run(["poise", *arguments]))
    if command in _HELP:
        print("Subcommands of the Python package:")
        for name, (_, sentence) in _PYTHON_COMMANDS.items():
            print(f"  {name:{_COLUMN - 2}}{sentence}")
    elif command == "train" and any(argument in _HELP for argument in arguments):
        print('With "model": {"import": "module:function"} the file trains a model of Python.')
    return status


def _train(arguments: list[str]) -> int | None:
    """Trains a file with model.import; None: all else, wrong arguments too."""
    parser = _TrainArguments(add_help=False, allow_abbrev=False)
    parser.add_argument("file")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    try:
        given = parser.parse_args(arguments)
    except _WrongArguments:
        return None
    from poise import run_file

    file = run_file.read(given.file, given.set)
    if file is None:
        return None
    from poise import train_command

    return train_command.train(file, given.json)


def _plan(arguments: list[str]) -> int | None:
    """Plans a file with model.import; None: all else, wrong arguments too."""
    if not any(argument.endswith(".json") for argument in arguments):
        return None
    from poise import plan_command, run_file

    try:
        given = plan_command.arguments_of(arguments)
    except plan_command.WrongArguments:
        return None
    file = run_file.read(given.file)
    return None if file is None else plan_command.plan(file, given)


class _WrongArguments(Exception):
    pass


class _TrainArguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _WrongArguments(message)  # the C++ command line says it


if __name__ == "__main__":
    sys.exit(main())
