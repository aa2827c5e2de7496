"""Mistakes that the pretend GPU must show, made on purpose, for test_pretend_gpu.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pretend_gpu
import torch


def pinned(values: torch.Tensor | float, numel: int = 1024) -> torch.Tensor:
    return torch.full((numel,), values).pin_memory()


def copy_arrives_with_its_event(folder: Path) -> Any:
    source, target, side = torch.ones(1024, device="cuda"), pinned(0.0), torch.cuda.Stream()
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        event = side.record_event()
    early = target.sum().item()
    event.synchronize()
    return [early, target.sum().item()]


def copy_arrives_where_it_is_asked_for(folder: Path) -> Any:
    """A loop over query() ends."""
    source, target, side = torch.ones(1024, device="cuda"), pinned(0.0), torch.cuda.Stream()
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        event = side.record_event()
    end = time.monotonic() + 60
    while not event.query():
        assert time.monotonic() < end
    return target.sum().item()


def pageable_copy_is_there_at_once(folder: Path) -> Any:
    target = torch.zeros(1024)
    target.copy_(torch.ones(1024, device="cuda"), non_blocking=True)
    return target.sum().item()


def kernel_before_its_input(folder: Path) -> Any:
    """Without and with the wait of one stream for the other."""
    seen = []
    for waits in (False, True):
        source, side = pinned(1.0), torch.cuda.Stream()
        target = torch.zeros(1024, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        seen.append(target.sum().item())
        torch.cuda.synchronize()
    return seen


def host_memory_written_too_early(folder: Path) -> Any:
    """The copy to the device reads what the host wrote meanwhile."""
    source, target = pinned(1.0), torch.zeros(1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    source.fill_(2.0)
    torch.cuda.synchronize()
    return target.mean().item()


def device_memory_freed_too_early(folder: Path) -> Any:
    """Without and with record_stream, which keeps a block from those who come next."""
    seen = []
    for records in (False, True):
        source, target, side = torch.ones(1024, device="cuda"), pinned(0.0), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        if records:
            source.record_stream(side)
        address = source.data_ptr()
        del source
        other = torch.full((1024,), 3.0, device="cuda")
        same_block = other.data_ptr() == address
        side.synchronize()
        seen.append([same_block, target.mean().item()])
    return seen


def unwritten_memory_is_nan(folder: Path) -> Any:
    return torch.empty(1 << 20, device="cuda").isnan().all().item()


def random_numbers_follow_the_seed(folder: Path) -> Any:
    torch.manual_seed(1)
    first = torch.rand(8, device="cuda")
    second = torch.rand(8, device="cuda")
    torch.manual_seed(1)
    again = torch.rand(8, device="cuda")
    before = torch.get_rng_state()
    torch.rand(8, device="cuda")
    return [
        torch.equal(first, again),
        torch.equal(first, second),
        torch.equal(before, torch.get_rng_state()),
    ]


def devices_do_not_mix(folder: Path) -> Any:
    """What each mistake is answered with."""
    on_cpu, on_first = torch.ones(4), torch.ones(4, device="cuda:0")
    on_second = torch.ones(4, device="cuda:1")
    said = {}
    for name, mistake in {
        "host": lambda: on_first + on_cpu,
        "other device": lambda: on_first + on_second,
    }.items():
        try:
            mistake()
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)
    moved = on_first.to("cuda:1")
    said["moved"] = [str(moved.device), moved.sum().item(), (on_second + 1).sum().item()]
    return said


CASES = [
    copy_arrives_with_its_event,
    copy_arrives_where_it_is_asked_for,
    pageable_copy_is_there_at_once,
    kernel_before_its_input,
    host_memory_written_too_early,
    device_memory_freed_too_early,
    unwritten_memory_is_nan,
    random_numbers_follow_the_seed,
    devices_do_not_mix,
]


if __name__ == "__main__":
    pretend_gpu.run_cases(CASES)
