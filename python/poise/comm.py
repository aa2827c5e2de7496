"""Groups of ranks: what an engine of several processes talks over.

torch.distributed.init_process_group("gloo")
group = poise.comm.from_process_group(torch.distributed.group.WORLD)

or, where torchrun, Slurm or mpirun started the process, without torch.distributed:

group = poise.comm.from_environment()
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
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
    "get_world_group",
    "get_world_size",
    "group_for",
    "hybrid",
    "is_initialized",
    "one_rank",
    "ranks_for",
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
    names: Sequence[int] = (),
    owned: bool = False,
) -> Group:
    """Around a process group of torch.distributed: gloo for the CPU, NCCL for a GPU.

    timeout: seconds that a rank waits for its peers, which may be slow but alive. One that died
    or failed is noticed within 15 seconds whatever the timeout.
    names: what errors call its ranks, where it is a part of a world; none: as they are numbered here.
    owned: an NCCL group ends with this one, on exit: nobody else calls destroy_process_group().
    """
    return _C.from_process_group(group, torch.device(device), timeout, list(names), owned)


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


def group_for(
    given: Any,
    device: torch.device | str,
    timeout: float = _HALF_AN_HOUR,
    names: Sequence[int] = (),
    owned: bool = False,
) -> Group:
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
        of_devices[kind] = from_process_group(given, device, timeout, names, owned)
    return of_devices[kind]


class Ranks(NamedTuple):
    """All ranks of a training, the group this rank shards in, and its equals in the other ones."""

    all: Group
    shard: Group | None = None  # None: all
    replica: Group | None = None  # None: nobody


# This rank's (shard group, replica group) of a process group, by size of a shard group: made once, so
# that engines one after the other do not leave groups behind.
_divided: weakref.WeakKeyDictionary[ProcessGroup, dict[int, tuple[ProcessGroup, ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)
atexit.register(_divided.clear)


def hybrid(
    shard_size: int,
    device: torch.device | str = "cpu",
    timeout: float = _HALF_AN_HOUR,
    group: ProcessGroup | None = None,
) -> Ranks:
    """Sharding inside blocks of `shard_size` ranks (a node), plain data parallel across them.

    zero.shard_group_size of the configuration does the same. All ranks of the process group call it;
    None: torch.distributed's default one.
    """
    whole = dist.group.WORLD if group is None else group
    size = whole.size()
    if shard_size < 1 or size % shard_size != 0:
        raise _C.Error(
            f"[comm] shard groups of {shard_size} ranks do not divide the {size} ranks; choose a "
            "divisor (zero.shard_group_size), the ranks of a node for example"
        )
    of_sizes = _divided.setdefault(whole, {})
    if shard_size not in of_sizes:
        of_sizes[shard_size] = _divide(whole, shard_size)
    shard, replica = (
        group_for(one, device, timeout, names, owned=True)
        for one, names in zip(of_sizes[shard_size], _parts(whole, shard_size), strict=True)
    )
    return Ranks(group_for(whole, device, timeout), shard, replica)


def _divide(whole: ProcessGroup, shard_size: int) -> tuple[ProcessGroup, ProcessGroup]:
    known = dist.get_process_group_ranks(whole)
    # Those who are not in a group need not make it: ranks outside of `whole` know nothing of this.
    shard, replica = (
        dist.new_group([known[rank] for rank in part], use_local_synchronization=True)
        for part in _parts(whole, shard_size)
    )
    return shard, replica


def _parts(whole: ProcessGroup, shard_size: int) -> tuple[range, range]:
    """Ranks of `whole` in this one's shard group, and its equals in the others."""
    first = whole.rank() // shard_size * shard_size
    return range(first, first + shard_size), range(
        whole.rank() % shard_size, whole.size(), shard_size
    )


def ranks_for(
    given: Any,
    device: torch.device | str,
    timeout: float = _HALF_AN_HOUR,
    shard_group_size: int = 0,
) -> Ranks:
    """The ranks an engine takes: Ranks as they are, else those of group_for, divided into shard groups.

    Args:
      given: Ranks, a Group, a process group of torch.distributed, or None.
      device: where tensors live.
      timeout: seconds that a rank waits for its peers.
      shard_group_size: ranks that shard among themselves; 0: all.
    """
    if isinstance(given, Ranks):
        return given
    whole = group_for(given, device, timeout)
    if whole.size == 1 or shard_group_size in (0, whole.size):
        return Ranks(whole)
    if isinstance(given, Group):
        given = _process_group_of(given)
        if given is None:
            raise _C.Error(
                f"[comm] zero.shard_group_size is {shard_group_size}, and the group given is none of "
                "torch.distributed's, which alone can be divided; give "
                f"poise.comm.ranks_from_environment({shard_group_size})"
            )
    return hybrid(shard_group_size, device, timeout, given)


def _process_group_of(group: Group) -> ProcessGroup | None:
    for process_group, of_devices in _of_process_groups.items():
        if any(one is group for one in of_devices.values()):
            return process_group
    return None


# What DeepSpeed scripts ask deepspeed.comm: these without torch.distributed too, the rest is its own.


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(dist, name):
        raise AttributeError(f"poise.comm has no {name}, nor has torch.distributed")
    return getattr(dist, name)


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: ProcessGroup | None = None) -> int:
    """Of this process among all, or those of a process group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """Of this process among those of its machine."""
    place = _C.place_from_environment()
    return 0 if place is None or place.local_rank is None else place.local_rank


def get_world_group() -> ProcessGroup | None:
    """torch.distributed's group of all ranks; None: it is not initialized."""
    return dist.group.WORLD if is_initialized() else None


def barrier(*arguments: Any, **named: Any) -> None:
    """Returns when all ranks have called it; arguments are those of torch.distributed."""
    if is_initialized():
        dist.barrier(*arguments, **named)
