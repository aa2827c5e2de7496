"""One seed for all generators that a model may draw from."""

from __future__ import annotations

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Python's, torch's and (where it is in use) numpy's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
