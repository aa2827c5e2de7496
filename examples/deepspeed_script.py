"""A training script as users of DeepSpeed write them: a small GPT on the standard library's sources.

    torchrun --nproc-per-node 2 examples/deepspeed_script.py --deepspeed --deepspeed_config examples/deepspeed_script.json

With `import poise.deepspeed as deepspeed` in place of the one line `import deepspeed` poise trains it.
examples/compare_with_deepspeed.py runs it both ways and compares the losses and the weights.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

BYTES = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, length, width = hidden.shape
        parts = self.qkv(self.attention_norm(hidden)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Gpt(nn.Module):
    """Predicts the next byte; the head's weight is that of the embedding."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.bytes.weight
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Rows(Dataset):
    """Pieces of the text, and the same a byte later."""

    def __init__(self, count: int, length: int, seed: int) -> None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
        text = b"".join(path.read_bytes() for path in sources)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(self.text) - length, (count,), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(self.starts[index])
        row = self.text[start : start + self.length + 1].long()
        return row[:-1], row[1:]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=160, help="of an epoch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", default="out/deepspeed_script", help="losses, weights, checkpoint")
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args(argv)


def main() -> None:
    args = parse()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = Gpt(args.layers, args.width, args.heads, args.length)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=Rows(args.rows, args.length, args.seed),
    )
    updates, total = [], torch.zeros((), device=engine.device)
    for _ in range(args.epochs):
        for inputs, labels in loader:
            loss = engine(inputs.to(engine.device), labels.to(engine.device))
            engine.backward(loss)
            total += loss.detach()
            updating = engine.is_gradient_accumulation_boundary()
            engine.step()
            if updating:
                deepspeed.comm.all_reduce(total)
                total /= engine.gradient_accumulation_steps() * deepspeed.comm.get_world_size()
                norm = float(engine.get_global_grad_norm())
                updates.append({"loss": total.item(), "norm": norm, "next_lr": engine.get_lr()[0]})
                total.zero_()
                if engine.global_rank == 0:
                    print(f"update {len(updates)}: {updates[-1]}", flush=True)
    engine.save_checkpoint(f"{args.out}/checkpoint", client_state={"updates": len(updates)})
    engine.save_16bit_model(args.out, "weights.bin")  # of the type that the model has
    if engine.global_rank == 0:
        Path(args.out, "updates.json").write_text(json.dumps(updates))


if __name__ == "__main__":
    main()
