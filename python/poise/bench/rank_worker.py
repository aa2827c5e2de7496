"""One rank of the measurements in poise.bench.ranks; rank 0 prints the figures as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from poise import Engine
from poise.models.byte_gpt import ByteGPT

SMALL = {"layers": 6, "width": 192, "heads": 6, "sequence_length": 256}
LARGE = {"layers": 8, "width": 512, "heads": 8, "sequence_length": 64}
MICRO_BATCH, ACCUMULATION, CLIP = 4, 2, 1.0
ADAMW = {"lr": 3e-4, "beta2": 0.95, "weight_decay": 0.1}

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], object]


def _window(sequence_length: int, micro_batches: int, rows: int = MICRO_BATCH) -> list[Batch]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (rows, sequence_length + 1)
    all_rows = [torch.randint(256, shape, generator=generator) for _ in range(micro_batches)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in all_rows]


class _Loss(nn.Module):
    """The loss as forward, so that DDP and FSDP see it."""

    def __init__(self, model: ByteGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.loss(inputs, targets)


def _poise(model: nn.Module, window: list, loss: Callable, stage: int, **options: object) -> Step:
    config = {"optimizer": {"type": "adamw", **ADAMW, "max_grad_norm": CLIP, **options}}
    engine = Engine(model, {**config, "zero": {"stage": stage}})
    return lambda: engine.step(window, loss)


def _poise_gpt(stage: int) -> Step:
    model = ByteGPT(**SMALL)
    window = _window(SMALL["sequence_length"], ACCUMULATION)
    return _poise(model, window, lambda b: (model.loss(*b), b[1].numel()), stage)


def _adamw_options() -> dict:
    return {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def _loop(net: nn.Module, optimizer: torch.optim.Optimizer, window: list) -> Step:
    """The loop people write around DDP and FSDP: gradients travel in the last micro-batch only."""
    is_ddp = isinstance(net, nn.parallel.DistributedDataParallel)

    def step() -> None:
        for i, batch in enumerate(window):
            last = i + 1 == len(window)
            if is_ddp:
                net.require_backward_grad_sync = last  # what no_sync() sets
            else:
                net.set_requires_gradient_sync(last)
            (net(*batch) / len(window)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _ddp(sharded_optimizer: bool) -> Step:
    net = nn.parallel.DistributedDataParallel(_Loss(ByteGPT(**SMALL)))
    if sharded_optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=torch.optim.AdamW, **_adamw_options()
        )
    else:
        optimizer = torch.optim.AdamW(net.parameters(), **_adamw_options())
    return _loop(net, optimizer, _window(SMALL["sequence_length"], ACCUMULATION))


def _fsdp2() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = _Loss(ByteGPT(**SMALL))
    for block in net.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), **_adamw_options())
    return _loop(net, optimizer, _window(SMALL["sequence_length"], ACCUMULATION))


def _interleaved(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, the ranks starting each step together."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - begin)
    return {name: round(1e3 * statistics.median(values), 2) for name, values in seconds.items()}


def stages() -> dict[str, float]:
    steps = {f"stage{stage}": _poise_gpt(stage) for stage in (1, 2, 3)}
    steps |= {"ddp": _ddp(False), "zero_redundancy": _ddp(True), "fsdp2": _fsdp2()}
    return _interleaved(steps, repeats=10)


def _deepspeed(stage: int) -> Step:
    """The calls of DeepSpeed's own examples; it divides by the window and clips by itself."""
    import deepspeed

    net = _Loss(ByteGPT(**SMALL))
    optimizer = torch.optim.AdamW(net.parameters(), **_adamw_options())
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    window = _window(SMALL["sequence_length"], ACCUMULATION)

    def step() -> None:
        for batch in window:
            engine.backward(engine(*batch))
            engine.step()

    return step


def deepspeed_stages() -> dict[str, float]:
    """DeepSpeed must have made the process group, so it comes first."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    steps = {f"deepspeed{stage}": _deepspeed(stage) for stage in (2, 3)}
    steps |= {f"stage{stage}": _poise_gpt(stage) for stage in (2, 3)}
    return _interleaved(steps, repeats=10)


class _Tiny(nn.Module):
    """2,000 parameters that cost next to nothing to use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        sizes = torch.randint(16, 257, (2000,), generator=generator).tolist()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(n, generator=generator)) for n in sizes
        )

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return (torch.cat(list(self.weights)) * scale).square().mean()


def tiny() -> dict[str, float]:
    window = [(torch.tensor(1.0 + i),) for i in range(ACCUMULATION)]
    model = _Tiny()
    net = nn.parallel.DistributedDataParallel(_Tiny())
    optimizer = torch.optim.AdamW(net.parameters(), **_adamw_options())
    steps = {
        "stage2": _poise(model, window, lambda b: model(*b), 2),
        "ddp": _loop(net, optimizer, window),
    }
    return _interleaved(steps, repeats=20)


def cost() -> dict[str, float]:
    """bytes_error and traffic_error over all stages, fp32 and 16-bit parameters."""
    ranks = dist.get_world_size()
    k = 3
    held, sent = [0.0], [0.0]
    for stage in range(4):
        for half in (False, True):
            model = ByteGPT(**LARGE)
            p = sum(parameter.numel() for parameter in model.parameters())
            precision = {"dtype": "bf16", "parameters": "bf16"} if half else {}
            engine = Engine(model, {"zero": {"stage": stage}, "precision": precision})
            split = [ranks if stage >= least else 1 for least in (1, 2, 3)]
            expected = {
                "optimizer": (12 if half else 8) * p / split[0],
                "gradients": 4 * p / split[1],
                "parameters": (2 if half else 4) * p / split[2],
            }
            now = engine.memory()["current"]
            held += [abs(now[name] / value - 1) for name, value in expected.items()]
            window = _window(LARGE["sequence_length"], k, rows=1)
            engine.group.reset_traffic()
            engine.step(window, lambda b, model=model: (model.loss(*b), b[1].numel()))
            moved = sum(kind["bytes"] for kind in engine.group.traffic().values())
            e_p, e_g = (2 if half else 4), 4
            # What lies in no block is gathered once per micro-batch and kept until its backward.
            rest = sum(q.numel() for n, q in model.named_parameters() if "blocks." not in n)
            per_window = [
                2 * e_g * p,
                (e_g + e_p) * p,
                (k * e_g + e_p) * p,
                k * ((2 * e_p + e_g) * p - e_p * rest),
            ][stage]
            sent.append(abs(moved / (per_window * (ranks - 1) / ranks) - 1))
    return {"bytes_error": max(held), "traffic_error": max(sent)}


def main(name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = {"stages": stages, "tiny": tiny, "cost": cost, "deepspeed": deepspeed_stages}[name]()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
