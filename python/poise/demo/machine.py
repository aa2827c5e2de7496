"""Facts about the machine that a figure of the report depends on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

import poise


def usable_cores() -> int:
    """Cores this process may run on (a container often has fewer than the machine)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """Threads of every row. A model this small gains nothing from more than eight."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else min(usable_cores(), 8)


def facts() -> dict[str, str]:
    return {
        "CPU": _cpu_name(),
        "cores usable": str(usable_cores()),
        "threads of each row": str(threads()),
        "GPU": "not used: the rows are sized for CPUs",
        "instruction set torch chose": torch.backends.cpu.get_cpu_capability(),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "poise": poise.__version__,
        "Python": platform.python_version(),
    }


def _field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def _cpu_name() -> str:
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _memory() -> str:
    kib = (_field("/proc/meminfo", "MemTotal") or "").split(" ")[0]
    return f"{int(kib) / (1 << 20):.1f} GiB" if kib.isdigit() else "unknown"
