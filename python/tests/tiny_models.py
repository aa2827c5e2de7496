"""Tiny models and windows that the Python tests train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 13
WIDTH = 16


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))


class TinyForCausalLM(nn.Module):
    """Predicts the next token; labels are shifted inside, as in transformers' models."""

    def __init__(self, dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(input_ids)[:, :-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), labels[:, 1:].flatten())


def tiny(dropout: float = 0.0, seed: int = 0) -> TinyForCausalLM:
    torch.manual_seed(seed)
    return TinyForCausalLM(dropout)


def batch(rows: int, length: int, seed: int, masked: float = 0.0) -> dict[str, torch.Tensor]:
    """A micro-batch; about `masked` of its labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    hidden = torch.rand(rows, length, generator=generator) < masked
    return {"input_ids": ids, "labels": ids.masked_fill(hidden, -100)}


def counted(micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (micro_batch["labels"][:, 1:] != -100).sum()


def split(whole: dict[str, torch.Tensor], rows: int) -> list[dict[str, torch.Tensor]]:
    """The same samples in micro-batches of at most so many rows."""
    pieces = [tensor.split(rows) for tensor in whole.values()]
    return [dict(zip(whole, piece, strict=False)) for piece in zip(*pieces, strict=False)]


def ragged_windows(updates: int = 4) -> list[list[dict[str, torch.Tensor]]]:
    """Windows of unequal token counts; a micro-batch counts nothing, the last window is short."""
    windows = []
    for update in range(updates):
        whole = batch(8, 12, seed=100 + update, masked=0.4)
        if update == 1:
            whole["labels"][2:4] = -100
        windows.append(split(whole, 2))
    windows[-1] = windows[-1][:3]
    return windows


def joined(window: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([piece[name] for piece in window]) for name in window[0]}


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    theirs = dict(b.named_parameters())
    return all(torch.equal(p, theirs[name]) for name, p in a.named_parameters())
