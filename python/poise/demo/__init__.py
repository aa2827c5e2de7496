"""What `make demo` runs: one small training done several ways, compared in a table and a report.

`python -m poise.demo [--out out/demo] [--quick]`, or `poise demo`.
"""

from __future__ import annotations

from collections.abc import Sequence


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `poise demo`; returns its exit status."""
    from poise.demo.__main__ import main as run  # late: the rows import this package too

    return run(arguments)
