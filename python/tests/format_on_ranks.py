"""One rank of test_state_format.py: saves of every kind, and what the engine itself says of them."""

from __future__ import annotations

import poise
import rank_processes
import torch
import torch.distributed as dist
from torch import nn

WAYS = {
    "fp32": {},
    "bf16": {"precision": {"dtype": "bf16", "parameters": "bf16"}, "zero": {"stage": 2}},
    "stage3": {"zero": {"stage": 3}},
    "asynchronous": {"zero": {"stage": 3}, "state": {"asynchronous": True}},
    "8bit": {"optimizer": {"lr": 0.05, "moments": "8bit"}, "zero": {"stage": 1}},
    "bf16 moments": {"optimizer": {"lr": 0.05, "moments": "bf16"}},
    "adafactor": {"optimizer": {"type": "adafactor", "lr": 0.05}},
}


class Net(nn.Module):
    """A tie, a frozen parameter, one that lies the other way round, a scalar, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 24)
        self.norm = nn.LayerNorm(24)
        self.turned = nn.Parameter((torch.randn(24, 40) * 0.1).t())
        self.back = nn.Linear(40, 24)
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((24,), 0.5), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.norm(self.embed(tokens)) * self.scale
        x = self.back(torch.relu(nn.functional.linear(x, self.turned))) * self.gain
        return self.head(x)


def saves(folder):
    """Names of WAYS -> the folder of the save; what the engine says goes into a file beside it."""
    found = {}
    for way, changes in WAYS.items():
        engine = poise.Engine(Net(), {"optimizer": {"lr": 0.05}, **changes})

        def loss_fn(batch, model=engine.model):
            return nn.functional.cross_entropy(model(batch).float(), (batch + 1) % 11), len(batch)

        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            window = [torch.randint(11, (n,), generator=generator) for n in (9, 5)]
            result = engine.step(window, loss_fn)
        path = engine.save(
            folder / way, cursor=77, user={"a": "b"}, own={"rank": str(dist.get_rank())}
        )
        engine.finish_save()
        names = [name for name, p in engine.model.named_parameters() if p.requires_grad]
        told = {f"master {name}": engine.master(name).clone() for name in names}
        if way not in ("8bit", "adafactor"):  # which have other forms
            for name in names:
                for i, moment in enumerate(engine.moments(name)):
                    told[f"moment.{i} {name}"] = moment.clone()
        told |= {f"state {name}": value for name, value in engine.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(told, f"{path}.told")
        found[way] = [str(path), result.updates]
    return found


if __name__ == "__main__":
    rank_processes.main({"saves": saves})
