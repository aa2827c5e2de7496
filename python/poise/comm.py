"""Groups of ranks: what an engine of several processes talks over.

torch.distributed.init_process_group("gloo")
group = poise.comm.from_process_group(torch.distributed.group.WORLD)

or, where torchrun, Slurm or mpirun started the process, without torch.distributed:

group = poise.comm.from_environment()
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from poise import _C
from poise._C import Group

__all__ = [
    "Group",
    "Ranks",
    "barrier",
    "fake",
    "from_environment",
    "from_process_group",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group_for",
    "hybrid",
    "is_initialized",
    "one_rank",
    "ranks_from_environment",
]

_HALF_AN_HOUR = 1800.0


def one_rank(device: torch.device | str = "cpu") -> Group:
    """A group of this process alone."""
    return _C.one_rank(torch.device(device))


def from_process_group(
    group: ProcessGroup,
    device: torch.device | str = "cpu",
    timeout: float = _HALF_AN_HOUR,
) -> Group:
    """Around a process group of torch.distributed: gloo for the CPU, NCCL for a GPU.

    timeout: seconds that a rank waits for its peers, which may be slow but alive. One that died
    or failed is noticed within 15 seconds whatever the timeout.
    """
    return _C.from_process_group(group, torch.device(device), timeout)


def from_environment(timeout: float = _HALF_AN_HOUR) -> Group:
    """The group that torchrun, Slurm or mpirun started this process for; else one rank.

    NCCL where every rank has a GPU of its own on its machine, else gloo.
    """
    return _C.from_environment(timeout)


def ranks_from_environment(shard_size: int = 0, timeout: float = _HALF_AN_HOUR) -> Ranks:
    """The same with groups as `hybrid` makes them, without torch.distributed; 0: one group."""
    return Ranks(*_C.ranks_from_environment(shard_size, timeout))


def fake(rank: int, size: int, device: torch.device | str = "cpu") -> Group:
    """Rank `rank` of a world of `size` that is not there; counts and moves nothing."""
    return _C.fake_group(rank, size, torch.device(device))


# The group over each process group that engines use, by kind of device. Two over the same one would
# mix their collectives, and one that ended with its last user would end on each rank when that
# rank's garbage collector ran: they last as long as their process group.
_of_process_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[str, Group]] = (
    weakref.WeakKeyDictionary()
)
atexit.register(_of_process_groups.clear)  # they wait for each other: while all still runs


def group_for(given: Any, device: torch.device | str, timeout: float = _HALF_AN_HOUR) -> Group:
    """The group an engine takes: a Group as it is, a process group of torch.distributed wrapped, and
    for None the default process group where there is one, else one rank."""
    if isinstance(given, Group):
        return given
    if given is None:
        if not (dist.is_available() and dist.is_initialized()):
            return one_rank(device)
        given = dist.group.WORLD
    if given.size() == 1:
        return one_rank(device)
    of_devices = _of_process_groups.setdefault(given, {})
    kind = torch.device(device).type
    if kind not in of_devices:
        of_devices[kind] = from_process_group(given, device, timeout)
    return of_devices[kind]


class Ranks(NamedTuple):
    """All ranks of a training, the group this rank shards in, and its equals in the other ones."""

    all: Group
    shard: Group | None = None  # None: all
    replica: Group | None = None  # None: nobody


def hybrid(
    shard_size: int, device: torch.device | str = "cpu", timeout: float = _HALF_AN_HOUR
) -> Ranks:
    """Sharding inside blocks of `shard_size` ranks (a node), plain data parallel across them.

    DeepSpeed's mics_shard_size. Over torch.distributed's default group; all ranks call it.
    """
    size = dist.get_world_size()
    if shard_size < 1 or size % shard_size != 0:
        raise _C.Error(
            f"[comm] shard_size {shard_size} does not divide the {size} ranks; choose a divisor"
        )

    def mine(groups: list[list[int]]) -> Group:
        made = [dist.new_group(ranks) for ranks in groups]  # every rank makes every group
        at = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
        return group_for(made[at], device, timeout)

    blocks = [list(range(first, first + shard_size)) for first in range(0, size, shard_size)]
    places = [list(range(place, size, shard_size)) for place in range(shard_size)]
    return Ranks(group_for(dist.group.WORLD, device, timeout), mine(blocks), mine(places))


# What DeepSpeed scripts ask deepspeed.comm; one rank needs no torch.distributed.


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Of this process among all."""
    return dist.get_rank() if is_initialized() else 0


def get_world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if is_initialized() else 1


def get_local_rank() -> int:
    """Of this process among those of its machine."""
    place = _C.place_from_environment()
    return 0 if place is None or place.local_rank is None else place.local_rank


def barrier() -> None:
    """Returns when all ranks have called it."""
    if is_initialized():
        dist.barrier()
