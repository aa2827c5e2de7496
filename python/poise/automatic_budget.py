"""memory_budget="auto": what the GPUs have free, the same number on every rank."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from poise._C import Error, Group, format_bytes, gpu_reserve

if TYPE_CHECKING:
    from poise.training_arguments import TrainingArguments


def check(device: torch.device) -> None:
    """Raises Error where nothing can be said to be free."""
    if device.type != "cuda":
        raise Error(
            "[trainer] memory_budget is auto, but this run is on the CPU, whose memory others share; "
            'give bytes, or a text such as "8GiB"'
        )


def settled(args: TrainingArguments, group: Group) -> TrainingArguments:
    """The same arguments with bytes for "auto"; all ranks: what the fullest GPU has is everybody's,
    since settings must not differ."""
    if args.memory_budget != "auto":
        return args
    mine = _available(args.device)
    rows = [str(mine)] if group.size == 1 else group.all_gather_text(str(mine), "free memory")
    budget = min(map(int, rows))
    if budget <= 0:
        total = torch.cuda.get_device_properties(args.device).total_memory
        raise Error(
            f"[trainer] memory_budget is auto, but a GPU has no more free than the "
            f"{format_bytes(gpu_reserve(total))} that are left to its libraries; end what else runs "
            "on it, or give memory_budget in bytes"
        )
    found = copy.copy(args)
    found.memory_budget = budget
    return found


def _available(device: torch.device) -> int:
    """What torch's allocator may come to hold, its own as of now included, less what the planner, too,
    leaves to libraries and to blocks that cannot be joined."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - gpu_reserve(total)
