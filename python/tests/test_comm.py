"""Groups around torch.distributed: two gloo processes, their failures, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import poise
import pytest
import torch
from poise import comm
from rank_processes import free_port

pytestmark = pytest.mark.waits

_START = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import poise
from poise import comm
rank = int(os.environ["RANK"])
"""
_GROUP = """
dist.init_process_group("gloo")
group = comm.from_process_group(dist.group.WORLD)
"""


def start(body: str, size: int = 2) -> list[subprocess.Popen]:
    """One process per rank, as torchrun would start them."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    code = _START + textwrap.dedent(body)
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def finish(ranks: list[subprocess.Popen], codes=None) -> list[str]:
    outputs = []
    try:
        for rank in ranks:
            outputs.append(rank.communicate(timeout=240)[0])
    finally:
        for rank in ranks:
            rank.kill()
    wanted = codes or [0] * len(ranks)
    assert [rank.returncode for rank in ranks] == wanted, "\n".join(outputs)
    return outputs


@pytest.mark.parametrize(
    "make", [_GROUP, "group = comm.from_environment()\n"], ids=["torch", "environment"]
)
def test_two_processes(make):
    body = make + textwrap.dedent("""
        assert (group.rank, group.size, group.backend) == (rank, 2, "gloo")
        assert group.device == torch.device("cpu")
        group.reset_traffic()
        group.barrier("start")
        assert group.all_gather_text(f"I am {rank}", "names") == ["I am 0", "I am 1"]
        traffic = group.traffic()
        assert traffic["barrier"] == {"calls": 1, "bytes": 0}, traffic
        # Lengths (8 bytes a rank), then texts.
        assert traffic["all_gather"] == {"calls": 2, "bytes": 8 + len("I am 0")}, traffic
        group.check()
        if dist.is_initialized():
            dist.barrier()  # torch's own collectives go on beside
            dist.destroy_process_group()
    """)
    finish(start(body))


def test_other_threads_run_during_a_wait():
    finish(
        start(
            _GROUP
            + textwrap.dedent("""
        ticks = []
        stop = threading.Event()
        def tick():
            while not stop.wait(0.01):
                ticks.append(1)
        ticker = threading.Thread(target=tick)
        ticker.start()
        group.barrier("start")
        if rank == 1:
            time.sleep(1)
        before = len(ticks)
        group.barrier("slow")
        during = len(ticks) - before
        stop.set()
        ticker.join()
        assert rank == 1 or during >= 5, during
    """)
        )
    )


def test_an_exception_is_told_to_the_others():
    outputs = finish(
        start(
            _GROUP
            + textwrap.dedent("""
        if rank == 1:
            time.sleep(0.5)
            group.abort("ValueError: token 777")
            sys.exit()
        try:
            group.barrier("step")
        except poise.Error as error:
            print(error)
            dist.destroy_process_group()  # does not wait for what is stuck
            sys.exit()
        sys.exit("no error")
    """)
        )
    )
    assert "ended the group: ValueError: token 777" in outputs[0]


def test_a_killed_rank_is_named():
    ranks = start(
        _GROUP
        + textwrap.dedent("""
        group.barrier("start")
        time.sleep(2)
        print("waiting", flush=True)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            group.barrier("step")
        except poise.Error as error:
            print(error)
            assert time.monotonic() - start < 15
            os._exit(0)
        sys.exit("no error")
    """)
    )
    outputs = finish(ranks, [-signal.SIGKILL, 0])
    assert f"pid {ranks[0].pid}" in outputs[1]
    assert "disappeared" in outputs[1]


@pytest.mark.parametrize("how", ["killed", "raises"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_lost_before_it_has_made_its_group_ends_the_others(how, lost):
    """One is there already and waits, the other comes later; the store is rank 0's."""
    body = f"""
        from torch import nn
        dist.init_process_group("gloo")
        if rank == {lost}:
            time.sleep(3)
            if "{how}" == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such model")
        time.sleep(0 if rank == 2 else 6)
        start = time.monotonic()
        try:
            poise.Engine(nn.Linear(4, 4), {{"zero": {{"stage": 2}}}})
        except poise.Error as error:
            print(error)
            assert time.monotonic() - start < 3 + 15, time.monotonic() - start
            sys.exit()
        sys.exit("no error")
    """
    ranks = start(body, size=3)
    ends = [0, 0, 0]
    ends[lost] = -signal.SIGKILL if how == "killed" else 1
    outputs = finish(ranks, ends)
    for rank in {0, 1, 2} - {lost}:
        said = outputs[rank]
        assert f"[comm] rank {lost} disappeared while rank" in said or (
            lost == 0 and "the store of the group" in said and "rank 0" in said
        ), said


@pytest.mark.slow
def test_a_rank_that_sleeps_for_a_minute_does_not_fall():
    """Nor does one that holds Python's lock all the while: what beats needs none."""
    begun = time.monotonic()
    finish(
        start(
            _GROUP
            + textwrap.dedent("""
        import ctypes
        group.barrier("start")
        if rank == 1:
            ctypes.PyDLL(None).sleep(60)
        group.barrier("late")
    """)
        )
    )
    assert time.monotonic() - begun > 60


def test_interrupt_ends_a_wait():
    ranks = start(
        _GROUP
        + textwrap.dedent("""
        if rank == 1:
            time.sleep(3)
            sys.exit()
        print("waiting", flush=True)
        try:
            group.barrier("never")
        except KeyboardInterrupt:
            group.abort("interrupted")
            os._exit(0)
        sys.exit("no interrupt")
    """)
    )
    assert ranks[0].stdout.readline() == "waiting\n"
    time.sleep(0.3)
    ranks[0].send_signal(signal.SIGINT)
    finish(ranks)


def test_one_rank_and_a_fake_one():
    group = comm.one_rank()
    assert (group.rank, group.size, group.backend) == (0, 1, "one rank")
    group.barrier()
    assert group.all_gather_text("alone") == ["alone"]
    group.abort("over")
    with pytest.raises(poise.Error, match="ended the group: over"):
        group.check()
    assert comm.fake(3, 1024).size == 1024
    with pytest.raises(poise.Error, match="no rank 4 in a group of 4"):
        comm.fake(4, 4)


def test_what_cannot_be_wrapped(monkeypatch):
    with pytest.raises(TypeError):
        comm.from_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert comm.from_environment().size == 1
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(poise.Error, match="has RANK but not WORLD_SIZE"):
        comm.from_environment()
    with pytest.raises(poise.Error, match="timeout of 0"):
        comm.from_environment(timeout=0)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    try:
        group = comm.from_process_group(torch.distributed.group.WORLD)
        assert (group.size, group.backend) == (1, "gloo")
    finally:
        torch.distributed.destroy_process_group()


def test_bytes_of_any_length_are_exchanged_in_rounds():
    body = (
        _GROUP
        + """
sizes = []
class Counting:
    all_gather_text = group.all_gather_text
    def all_gather_bytes(self, data, what):
        sizes.append(len(data))
        return group.all_gather_bytes(data, what)
for lengths, rounds in (((5, 9), [[4, 1, 0], [4, 4, 1]]), ((0, 0), [[0], [0]]), ((4, 0), [[4], [0]])):
    data = [bytes(range(length)) for length in lengths]
    sizes.clear()
    assert poise.ranks.all_bytes(Counting(), data[rank], "bytes", most=4) == data
    assert sizes == rounds[rank], sizes
print("exchanged")
"""
    )
    assert all("exchanged" in output for output in finish(start(body)))
