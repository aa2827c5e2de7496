"""One update whose activations go to a file that is slower than Python's lock is asked for."""

import tempfile

import poise
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to("cuda")
offload = {"activations": "file", "activation_min_bytes": 1, "directory": tempfile.gettempdir()}
engine = poise.Engine(model, {"offload": offload})
data = torch.randn(8, 64, device="cuda")
assert engine.step([data], lambda x: (model(x).square().mean(), len(x))).applied
