"""Ranks as processes, for tests of several ranks: a script of this folder, started once for each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SECONDS = 240  # a start that takes longer hangs


def free_port() -> int:
    """None of those that the system gives to connections: one of those may take it before it is used."""
    while True:
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", random.SystemRandom().randrange(12000, 32000)))
            return one.getsockname()[1]


def by_torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a rank, but for its store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def by_open_mpi(rank: int, size: int, port: int) -> dict[str, str]:
    """That of Open MPI's mpirun, with the port that docs/launching.md says to give."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "MASTER_PORT": str(port),
    }


def by_slurm(rank: int, size: int, port: int) -> dict[str, str]:
    """That of srun; `port` is Slurm's own choice, by the number of the job."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(port),
    }


def start(command: list[str], size: int = 2, launcher: Any = by_torchrun) -> list[subprocess.Popen]:
    """The command once for each rank."""
    said = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(said)}
    environment |= {
        "PYTHONPATH": os.pathsep.join(p for p in [str(FOLDER), *sys.path] if p),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    port = free_port()
    return [
        subprocess.Popen(
            command, env={**environment, **launcher(rank, size, port)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def finish(ranks: list[subprocess.Popen], codes: list[int] | None = None) -> list[str]:
    """Waits for all; what they wrote. Fails where one ends with another code than asked for (0)."""
    outputs = []
    try:
        for rank in ranks:
            outputs.append(rank.communicate(timeout=SECONDS)[0])
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == (codes or [0] * len(ranks)), "\n".join(outputs)
    return outputs


def run(
    script: str, name: str, folder: Path, size: int = 2, launcher: Any = by_torchrun
) -> list[Any]:
    """What each rank of `script` called with `name` put into its file by `report`."""
    finish(start([sys.executable, str(FOLDER / script), name, str(folder)], size, launcher))
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(size)]


def main(cases: dict[str, Any]) -> None:
    """On a rank: runs the case that `run` asked for, over gloo, and reports what it returns. Of a pair
    the second is a dictionary of tensors, which rank 0 writes to CASE.pt."""
    import torch
    import torch.distributed as dist

    name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    value = cases[name](Path(folder))
    if isinstance(value, tuple):
        value, tensors = value
        if dist.get_rank() == 0:
            torch.save(tensors, Path(folder) / f"{name}.pt")
    report(name, folder, dist.get_rank(), value)
    dist.barrier()
    dist.destroy_process_group()


def report(name: str, folder: str | Path, rank: int, value: Any) -> None:
    """Called on a rank: hands the value to `run`."""
    Path(folder, f"{name}_{rank}.json").write_text(json.dumps(value))
