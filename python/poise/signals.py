"""Ctrl-C and SIGTERM as exceptions, for a command that ends its run cleanly."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupted(KeyboardInterrupt):
    """A signal came; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """While it is open SIGINT and SIGTERM raise Interrupted, once; a second one ends the process.

    On other threads than the main one, which gets no signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def interrupt(number: int, frame: object) -> None:
        for known in old:
            signal.signal(known, signal.SIG_DFL)
        raise Interrupted(number)

    for number in old:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
