"""A small classifier that test_wrap.py and test_wrap_state.py train by a plain loop and by a wrapped one."""

import poise
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)).to(dtype)


def rows(count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return TensorDataset(torch.randn(count, 8, generator=generator) + labels[:, None], labels)


def adamw(model, **changes):
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, **changes})


def plain(model, optimizer, windows, scheduler=None, max_norm=None):
    """Each window as one big batch, in plain torch; returns the norms before clipping."""
    norms = []
    for x, y in windows:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
        limit = float("inf") if max_norm is None else max_norm
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return norms


def wrapped(model, optimizer, scheduler, loader, accumulation, max_norm=None, epochs=1, **more):
    """The loop as its user writes it; returns norms, learning rates and the wrapped model."""
    model, optimizer, scheduler, loader = poise.wrap(
        model, optimizer, scheduler, loader, accumulation=accumulation, **more
    )
    norms, rates = [], []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            model.backward(F.cross_entropy(model(x), y))
            norm = None if max_norm is None else model.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if norm is not None:
                norms.append(float(norm))
            rates.append(optimizer.param_groups[0]["lr"])
    return norms, rates, model


def distance(model, reference):
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    top = sum(((a.detach().double() - b.detach().double()) ** 2).sum() for a, b in pairs)
    return float(
        (top / sum((p.detach().double() ** 2).sum() for p in reference.parameters())).sqrt()
    )
