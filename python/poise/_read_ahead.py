"""A thread that draws from an iterator ahead of its consumer; it ends with the consumer, with an
exception, and with the interpreter."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

_POLL_SECONDS = 0.2  # how soon a full queue notices that nobody wants more
_JOIN_SECONDS = 30  # longest wait for an item that is being read when it is told to stop


class _Shared:
    """What thread and consumer both hold; it must not lead back to the consumer."""

    def __init__(self, source: Iterator, depth: int) -> None:
        self.source = source
        self.items: queue.Queue = queue.Queue(depth)
        self.stopping = threading.Event()
        # Of each thread: what the source puts on "cuda" goes to the GPU of whom it reads for.
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def put(self, item: Any) -> None:
        while not self.stopping.is_set():
            try:
                self.items.put(item, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue

    def run(self) -> None:
        try:
            if self.gpu is not None:
                torch.cuda.set_device(self.gpu)
            while not self.stopping.is_set():
                try:
                    item = next(self.source)
                except StopIteration:
                    self.put((None, StopIteration()))
                    return
                self.put((item, None))
        except BaseException as error:
            self.put((None, error))


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    shared.stopping.set()
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(_JOIN_SECONDS)


class ReadAhead:
    """Iterates over `source`, up to `depth` items ahead.

    The first item is drawn on the caller's thread: whatever the source starts (worker processes)
    belongs to that one.
    """

    def __init__(self, source: Iterator, depth: int) -> None:
        self._first: list[Any] = []
        try:
            self._first.append(next(source))
        except StopIteration:
            pass
        self._shared = _Shared(source, depth)
        self._thread = threading.Thread(
            target=self._shared.run, name="poise-read-ahead", daemon=True
        )
        # A finalizer also runs at interpreter exit, before daemon threads are frozen mid-call.
        self._finalizer = weakref.finalize(self, _stop, self._shared, self._thread)
        self._thread.start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._first:
            return self._first.pop()
        if self._shared.stopping.is_set():
            raise StopIteration
        item, error = self._shared.items.get()
        if error is None:
            return item
        self._finalizer()
        raise error

    def close(self) -> None:
        """Stops the thread, then the source."""
        self._finalizer()
        self._first.clear()
        if not self._thread.is_alive() and hasattr(self._shared.source, "close"):
            self._shared.source.close()
