"""Machines of a run as a DeepSpeed hostfile names them, and the command that starts each one's ranks."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from poise._C import Error

LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)$")
# What a rank on another machine gets of this one's environment.
EXPORTED = ("NCCL", "PYTHON", "GLOO", "OMP_", "TORCH", "CUDA_DEVICE_ORDER", "MASTER_")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
      name: as ssh knows it.
      slots: numbers of its ranks, which are those of its GPUs.
      chosen: not all of them run, so that the others' GPUs are hidden.
    """

    name: str
    slots: tuple[int, ...]
    chosen: bool = False

    @property
    def is_here(self) -> bool:
        here = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", here, here.split(".")[0], socket.getfqdn())


def read(path: str | Path) -> list[Host]:
    """Lines "name slots=8"; # begins a comment. Raises Error on anything else."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Error(
            f"[deepspeed] cannot read the hostfile {path}: {error.strerror}; give its path with "
            "--hostfile"
        ) from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = LINE.match(text)
        if match is None or int(match[2]) < 1:
            raise Error(f"[deepspeed] line {number} of {path} is {text!r}; write 'name slots=8'")
        if match[1] in {host.name for host in hosts}:
            raise Error(f"[deepspeed] line {number} of {path} names {match[1]} again")
        hosts.append(Host(match[1], tuple(range(int(match[2])))))
    if not hosts:
        raise Error(f"[deepspeed] {path} names no machine; write 'name slots=8'")
    return hosts


def chosen(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """Those of "name", "name:0,2", joined by @, or all without them."""
    if include and exclude:
        raise Error("[deepspeed] --include and --exclude are both given; give one of them")
    parts = _parts(include or exclude, hosts)
    picked = []
    for host in hosts:
        named = parts.get(host.name)
        if include:
            slots = () if named is None else named or host.slots
        else:
            slots = (
                host.slots if named is None else [s for s in host.slots if named and s not in named]
            )
        if slots:
            picked.append(Host(host.name, tuple(slots), len(slots) < len(host.slots)))
    if not picked:
        raise Error(f"[deepspeed] no rank is left of {', '.join(host.name for host in hosts)}")
    return picked


def command(
    hosts: Sequence[Host], node: int, address: str, port: int, script: Sequence[str]
) -> list[str]:
    """What is run on this machine to start the ranks of host number `node`.

    Args:
      address, port: where all ranks meet.
      script: with its arguments, as torchrun takes them.
    """
    host = hosts[node]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}",
        f"--node-rank={node}", f"--nproc-per-node={len(host.slots)}", f"--master-addr={address}",
        f"--master-port={port}", *script,
    ]  # fmt: skip
    settings = {}
    if host.chosen:
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.slots))
    if host.is_here:
        return ["env", *_pairs(settings), *torchrun]
    settings = {name: v for name, v in os.environ.items() if name.startswith(EXPORTED)} | settings
    line = f"cd {shlex.quote(os.getcwd())} && env {shlex.join([*_pairs(settings), *torchrun])}"
    return ["ssh", "-o", "BatchMode=yes", host.name, line]


def _pairs(settings: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def _parts(text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """Slots by name; empty ones stand for all."""
    found = {}
    known = {host.name: host for host in hosts}
    for part in filter(None, text.split("@")):
        name, _, numbers = part.partition(":")
        if name not in known:
            raise Error(f"[deepspeed] {name} is not in the hostfile; it has {', '.join(known)}")
        slots = tuple(int(n) if n.strip().isdigit() else -1 for n in numbers.split(",") if n)
        wrong = [slot for slot in slots if slot not in known[name].slots]
        if wrong:
            raise Error(f"[deepspeed] {part!r}: {name} has slots 0 to {known[name].slots[-1]}")
        found[name] = slots
    return found
