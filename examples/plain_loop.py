"""A loop in plain torch: a classifier of noisy points, AdamW with a warmup and cosine schedule.

examples/plain_loop_with_poise.py is the same loop with four lines changed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def points(count: int = 360) -> TensorDataset:
    """Three clouds in eight dimensions."""
    labels = torch.arange(count) % 3
    return TensorDataset(torch.randn(count, 8) + labels[:, None], labels)


def main(epochs: int = 3, batch_size: int = 32) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)
    )
    data = DataLoader(points(), batch_size=batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * 12)
    losses = []
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    print(f"{len(losses)} micro-batches, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
