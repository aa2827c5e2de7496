"""One of two ranks on pretend GPUs, on its way to NCCL's communicator: `BACKEND CASE`, for
test_pretend_lost_ranks.py. Nothing is caught, so that it ends as a script of a user's would."""

from __future__ import annotations

import os
import signal
import sys
import time

import poise
import pretend_gpu
import torch.distributed as dist

LATE = 13  # seconds; a rank without a sign of life is lost after 10


def main(backend: str, case: str) -> None:
    pretend_gpu.switch_on()
    dist.init_process_group(backend)
    if dist.get_rank() == 1 and case == "killed before its group":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and case == "late to its group":
        time.sleep(LATE)
    timeout = 3 if "timeout" in sys.argv[3:] else 600
    group = poise.comm.from_process_group(dist.group.WORLD, "cuda", timeout=timeout)
    if dist.get_rank() == 1 and case == "killed in its group":
        time.sleep(2)  # rank 0 is in ncclCommInitRank
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and case == "raises in its group":
        time.sleep(2)
        group.abort("ValueError: a bad row")
        return
    if dist.get_rank() == 1 and case == "late to the first collective":
        time.sleep(LATE)
    group.barrier("start")
    print("through")


if __name__ == "__main__":
    main(*sys.argv[1:3])
