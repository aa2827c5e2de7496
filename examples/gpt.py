"""A byte-level GPT on real text (the Python standard library's own sources), in a loop of your own.

    python examples/gpt.py --updates 200 --accumulation 4 --checkpointing sqrt --precision bf16

Whatever the accumulation and recomputation, the losses are the same; only memory and time change.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import poise
import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256


class Block(nn.Module):
    """Attention and a multi-layer perceptron, each behind a norm (pre-LN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        q, k, v = (
            self.qkv(self.attention_norm(hidden))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.mlp_norm(hidden))


class ByteGpt(nn.Module):
    """Predicts the next byte."""

    def __init__(
        self, layers: int = 4, width: int = 128, heads: int = 4, length: int = 128
    ) -> None:
        super().__init__()
        self.length = length
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def read_text(limit: int = 4 << 20) -> torch.Tensor:
    """The first `limit` bytes of the standard library's sources."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(
    text: torch.Tensor, length: int, global_batch: int, micro_batch: int, updates: int, seed: int
):
    """For each update its micro-batches: random rows of length + 1 bytes."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        starts = torch.randint(len(text) - length, (global_batch, 1), generator=generator)
        yield text[starts + torch.arange(length + 1)].long().split(micro_batch)


@torch.no_grad()
def continuation(model: ByteGpt, prompt: str, count: int = 64) -> str:
    row = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        logits = model(row[:, -model.length :])[:, -1].float()
        row = torch.cat([row, torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1)], dim=1)
    return bytes(row[0].tolist()).decode(errors="replace")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=16, help="rows of one update")
    parser.add_argument(
        "--accumulation", type=int, default=4, help="micro-batches they are cut into"
    )
    parser.add_argument(
        "--checkpointing", default="none", help="none, every_n, sqrt, first_m, selective"
    )
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16")
    parser.add_argument(
        "--budget", default="0", help='memory that the run may hold, for example "64MiB"'
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[float]:
    args = parse(argv)
    torch.manual_seed(args.seed)
    model = ByteGpt(args.layers, args.width, length=args.length)
    engine = poise.Engine(
        model,
        {
            "batch": {
                "micro_batch_size": args.global_batch // args.accumulation,
                "accumulation": args.accumulation,
            },
            "precision": {"dtype": args.precision},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0},
            "schedule": {
                "type": "cosine",
                "warmup_updates": args.updates // 10,
                "total_updates": args.updates,
            },
            "checkpointing": {"policy": args.checkpointing},
            "memory": {"budget_bytes": args.budget},
        },
    )

    def loss(rows: torch.Tensor):
        logits = model(rows[:, :-1])
        targets = rows[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), targets.numel()

    losses = []
    micro_batch = args.global_batch // args.accumulation
    for window in windows(
        read_text(), args.length, args.global_batch, micro_batch, args.updates, args.seed
    ):
        result = engine.step(window, loss)
        losses.append(result.loss)
        if result.updates % 10 == 0 or result.updates == args.updates:
            peak = result.peak_bytes / 2**20
            print(f"update {result.updates:4}  loss {result.loss:.4f}  peak {peak:.1f} MiB")
    print(continuation(model, "def "))
    return losses


if __name__ == "__main__":
    main()
