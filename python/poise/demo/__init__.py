"""What `make demo` runs: one small training done several ways, compared in a table and a report.

`python -m poise.demo [--out out/demo] [--quick]`
"""


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""
