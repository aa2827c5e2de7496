"""The ranks of a Trainer: torch.distributed, begun where a launcher started this process.

torchrun, Slurm and mpirun say in the environment which rank a process is (docs/launching.md). Where
torch.distributed is initialized already, its default group is what counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from poise import _C, comm
from poise._C import Error, Group
from poise.signals import EvaluationGivenUp, Interrupted

logger = logging.getLogger("poise")


@dataclasses.dataclass(frozen=True)
class Here:
    """Which rank this process is; `local` among those of this machine, None where nobody said."""

    rank: int = 0
    size: int = 1
    local: int | None = None


def here() -> Here:
    """Raises Error on an environment that contradicts itself."""
    if dist.is_available() and dist.is_initialized():
        place = _C.place_from_environment()
        return Here(dist.get_rank(), dist.get_world_size(), place.local_rank if place else None)
    place = _C.place_from_environment()
    return Here() if place is None else Here(place.rank, place.size, place.local_rank)


def device(use_cpu: bool = False) -> torch.device:
    """The GPU of this rank, where there are any; else the CPU."""
    if use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    place, gpus = here(), torch.cuda.device_count()
    if place.size == 1 or place.local is None:
        return torch.device("cuda", torch.cuda.current_device())
    if gpus == 1:  # Slurm and others show each rank its own alone
        return torch.device("cuda", 0)
    if place.local >= gpus:
        raise Error(
            f"[trainer] this is rank {place.local} of its machine, which has {gpus} GPUs; start one "
            "rank for each, or set use_cpu"
        )
    return torch.device("cuda", place.local)


def numbered(where: torch.device | str) -> torch.device:
    """ "cuda" with the number of the current GPU, as torch means it."""
    where = torch.device(where)
    if where.type != "cuda" or where.index is not None:
        return where
    return torch.device("cuda", torch.cuda.current_device())


def join(where: torch.device, backend: str | None, timeout: float) -> Group:
    """The group of all ranks; initializes torch.distributed where that is still to be done.

    Args:
      where: the device of this rank.
      backend: of torch.distributed; None: gloo for the CPU, nccl for GPUs.
      timeout: seconds that a rank waits for the others.
    """
    if where.type == "cuda":
        torch.cuda.set_device(where)
    place = here()
    ours = place.size > 1 and not dist.is_initialized()
    if ours:
        _initialize(place, backend or ("nccl" if where.type == "cuda" else "gloo"), timeout)
    group = comm.group_for(None, where, timeout, owned=ours)
    if ours and where.type == "cuda":
        with told_to_others(group):
            _refuse_a_shared_gpu(group, where, timeout)
    return group


def _initialize(place: Here, backend: str, timeout: float) -> None:
    launch = _C.place_from_environment()
    # Where torchrun keeps a store the ranks meet there, which only env:// knows of.
    meeting = "env://" if launch.store_runs else f"tcp://{launch.address}:{launch.port}"
    try:
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=place.rank,
            world_size=place.size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise Error(
            f"[trainer] rank {place.rank} of {place.size} did not meet the others at "
            f"{launch.address}:{launch.port} by {backend}: {error}; start all ranks with the same "
            "MASTER_ADDR and MASTER_PORT"
        ) from None


def _refuse_a_shared_gpu(group: Group, where: torch.device, timeout: float) -> None:
    """Ranks that see one GPU each may see the same, which NCCL would say late, in words of its own."""
    mine = str(torch.cuda.get_device_properties(where).uuid)
    group.leave_note(f"gpu/{group.rank}", mine)
    others = range(group.size) if torch.cuda.device_count() == 1 else ()
    deadline = time.monotonic() + timeout
    for rank in others:
        while (theirs := group.note(f"gpu/{rank}")) is None:
            group.check()
            if time.monotonic() > deadline:
                raise Error(
                    f"[trainer] rank {group.rank} waited {timeout:g} s for rank {rank} to say which "
                    "GPU it has; look at the output of that rank, or raise the timeout"
                )
            time.sleep(0.01)
        if rank != group.rank and theirs == mine:
            raise Error(
                f"[trainer] ranks {group.rank} and {rank} have the same GPU; start as many ranks as "
                "there are GPUs, or set use_cpu"
            )


@contextlib.contextmanager
def only_first_logs(group: Group) -> Iterator[None]:
    """Ranks but the first log errors only: what they have to say they would all say."""
    level = logger.level
    if group.rank > 0:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def told_to_others(group: Group) -> Iterator[None]:
    """An exception ends the group: the other ranks stop with its message instead of waiting. Not the end
    by a signal, which all ranks have agreed on."""
    try:
        yield
    except (EvaluationGivenUp, Interrupted):
        raise
    except BaseException as error:
        if group.size > 1:
            group.abort(f"{type(error).__name__}: {error}")
        raise


def sums_of(group: Group, values: list[int]) -> list[int]:
    """Each number summed over all ranks; all give as many, or none."""
    if group.size == 1:
        return values
    rows = [json.loads(row) for row in group.all_gather_text(json.dumps(values), "counts")]
    return [sum(column) for column in zip(*(row for row in rows if row), strict=True)]


def any_of(group: Group, flags: list[bool]) -> list[bool]:
    """Each flag, whether some rank has it set."""
    if group.size == 1:
        return flags
    rows = group.all_gather_text("".join("01"[flag] for flag in flags), "what callbacks ask for")
    return [any(row[i] == "1" for row in rows) for i in range(len(flags))]


def all_bytes(group: Group, mine: bytes, what: str, most: int = 1 << 24) -> list[bytes]:
    """What each rank gives, in rounds of no more than `most` bytes a rank: over NCCL they pass through
    memory of every GPU, all ranks' at once."""
    longest = max(map(int, group.all_gather_text(str(len(mine)), what)))
    rounds = [
        group.all_gather_bytes(mine[begin : begin + most], what)
        for begin in range(0, max(1, longest), most)
    ]
    return [b"".join(parts) for parts in zip(*rounds, strict=True)]
