"""The memory ledger: bytes by account, and budgets that really run out.

with poise.memory.Ledger(budget="64MiB") as ledger:
    train()
print(ledger.snapshot().at_peak)
"""

from poise._C import (
    Ledger,
    Snapshot,
    cuda_snapshot,
    format_bytes,
    parse_bytes,
    reset_cuda_peak,
)

__all__ = [
    "Ledger",
    "Snapshot",
    "cuda_snapshot",
    "format_bytes",
    "parse_bytes",
    "reset_cuda_peak",
]
