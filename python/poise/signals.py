"""Ctrl-C, SIGTERM and Slurm's SIGUSR1 as exceptions, for a command that ends its run cleanly."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import threading
import time
from collections.abc import Iterator

from poise._C import Group

SAVE_FIRST = (signal.SIGTERM, signal.SIGUSR1)  # ask a run that saves for a save and its end


class Interrupted(SystemExit):
    """A signal came; `number` says which. Where nobody catches it the program ends, without a
    traceback, with the status that shells give to that signal: 128 + number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class EvaluationGivenUp(BaseException):
    """All ranks leave an evaluation, since a signal has asked one of them for a save and the end."""


class Signals:
    """What has come; raised where the run is ready for it."""

    # Slurm sends a signal to every process, and torchrun, which gets it, too, passes it on: the save must
    # live through that. Whoever waits longer and sends it again ends the process.
    SAME_SIGNAL = 3.0  # seconds

    def __init__(self) -> None:
        self.save_asked: int | None = None
        self._first: dict[int, float] = {}  # when each came

    def note(self, number: int) -> None:
        """For a handler of a signal that asks for a save."""
        now = time.monotonic()
        if number not in self._first:
            self._first[number] = now
            self.save_asked = number
        elif now - self._first[number] > self.SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def check(self) -> None:
        """Raises Interrupted where a signal has asked for a save, once."""
        if self.save_asked is not None:
            number, self.save_asked = self.save_asked, None
            raise Interrupted(number)


class AskedOfRanks:
    """Whether a signal has asked this rank or another for a save and the end, between micro-batches.

    It reaches one rank or each at a moment of its own, within a window; the one that has got it leaves a
    note, so that the others need not finish the window first. All ranks make one.
    """

    LOOK_EVERY = 0.05  # seconds: a look asks the store

    def __init__(self, signals: Signals, group: Group) -> None:
        self._signals, self._group, self._looked = signals, group, 0.0
        if group.size > 1:
            # The store may still have the notes of a run that the launcher has started again.
            words = group.all_gather_text(secrets.token_hex(8), "name of the run")
            self._note = f"trainer/{words[0]}/save_asked"

    def now(self, at_once: bool = False) -> bool:
        """at_once: asks the store, whenever it was asked last."""
        mine = self._signals.save_asked is not None
        if mine or self._group.size == 1:
            if mine and self._group.size > 1:
                self._group.leave_note(self._note, "yes")
            return mine
        if not at_once and time.monotonic() - self._looked < self.LOOK_EVERY:
            return False
        self._looked = time.monotonic()
        return self._group.note(self._note) is not None


class AgreedEnd:
    """The same between the batches of an evaluation, which ranks run at their own pace, but for what a
    forward gathers: they may leave it after the same batch alone. All make the same calls, and ask each
    other after as many batches as the slowest takes EVERY seconds for.
    """

    EVERY = 0.25

    def __init__(self, signals: Signals, group: Group) -> None:
        self._signals, self._group = signals, group
        self._batches, self._left, self._since = 1, 0, time.monotonic()

    def now(self) -> bool:
        mine = self._signals.save_asked is not None
        if self._group.size == 1:
            return mine
        self._left -= 1
        if self._left > 0:
            return False
        seconds = time.monotonic() - self._since
        texts = self._group.all_gather_text(json.dumps([mine, seconds]), "end of the evaluation")
        asked, taken = zip(*map(json.loads, texts), strict=True)
        fit = int(self._batches * self.EVERY / max(*taken, 1e-9))
        self._batches = self._left = max(1, min(fit, 2 * self._batches))
        self._since = time.monotonic()
        return any(asked)


@contextlib.contextmanager
def saves_noted() -> Iterator[Signals]:
    """While it is open SIGTERM and SIGUSR1 are noted, unless the program has handlers for them. One that
    comes again more than Signals.SAME_SIGNAL later ends the process."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def note(number: int, frame: object) -> None:
        signals.note(number)

    ours = [number for number in SAVE_FIRST if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, note)
    try:
        yield signals
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def signals_raised(saves: bool = False) -> Iterator[Signals]:
    """While it is open SIGINT and SIGTERM raise Interrupted, once; a second one ends the process.

    In a run that saves, SIGTERM and SIGUSR1 are only noted: `check` raises them; one of them that comes
    again ends the process if that is more than Signals.SAME_SIGNAL later, and Ctrl-C does at once. On other
    threads than the main one, which gets no signals, it does nothing.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if saves else []))
    old = {number: signal.getsignal(number) for number in numbers}

    def interrupt(number: int, frame: object) -> None:
        if saves and number in SAVE_FIRST:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signals.note(number)
            return
        for known in old:
            signal.signal(known, signal.SIG_DFL)
        raise Interrupted(number)

    for number in old:
        signal.signal(number, interrupt)
    try:
        yield signals
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
