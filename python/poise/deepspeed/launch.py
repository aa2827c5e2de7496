"""How a DeepSpeed script begins: its command line and its ranks."""

from __future__ import annotations

import argparse
import atexit
import datetime
import logging
from typing import Any

import torch
import torch.distributed as dist

from poise import _C, ranks
from poise._C import Group

logger = logging.getLogger("poise")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """--deepspeed and --deepspeed_config, and --local_rank where the parser has none yet."""
    group = parser.add_argument_group("DeepSpeed", "settings that poise.initialize reads")
    group.add_argument("--deepspeed", action="store_true", help="accepted; poise trains either way")
    group.add_argument("--deepspeed_config", default=None, help="the JSON file")
    known = {option for action in parser._actions for option in action.option_strings}
    if "--local_rank" not in known:
        names = ("--local_rank", "--local-rank")
        group.add_argument(*names, type=int, default=-1, help="accepted; the environment says it")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta = datetime.timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> Group:
    """The ranks that torchrun, Slurm or mpirun started; one rank where nobody said. torch.distributed is
    initialized afterwards, for one rank too.

    Args:
      dist_backend: of torch.distributed; nccl without a GPU means gloo.
      timeout: that a rank waits for the others.
      auto_mpi_discovery, distributed_port, verbose, init_method, dist_init_required, config, rank,
        world_size: accepted; the launcher's environment says it (docs/launching.md).
    """
    device = ranks.device()
    if dist_backend == "nccl" and device.type != "cuda":
        logger.info("[deepspeed] dist_backend is nccl, but there is no GPU: gloo")
        dist_backend = None
    group = ranks.join(device, dist_backend, timeout.total_seconds())
    if not dist.is_initialized():
        _alone(device)
    return group


def join() -> None:
    """What initialize() begins with: init_distributed(), but for a process that nobody launched, whose
    torch.distributed is left alone."""
    if dist.is_initialized() or _C.place_from_environment() is not None:
        init_distributed()


def _alone(device: torch.device) -> None:
    """A process group of this process, so that a script's torch.distributed.get_rank() and all_reduce()
    do on one rank what they do on several."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_end_alone)


def _end_alone() -> None:
    """Of NCCL's, torch complains on exit where nobody did."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def device() -> torch.device:
    """Of this rank."""
    return ranks.device()
