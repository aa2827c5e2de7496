"""What several files of tests ask for by name."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

# A shell that starts the tests in the background has SIGINT ignored, also in what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny operations on several threads wait for each other where a machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a machine that `poise plan --calibrate` never measured."""
    monkeypatch.setenv("POISE_MACHINE", "/nonexistent/machine.json")
