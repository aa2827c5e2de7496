"""Two processes over gloo, one thread each: poise's stages against what torch offers, interleaved in
one run, and what the stages cost in bytes against the formulas."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

from poise import Error

RANKS = 2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _measure(name: str, more: dict[str, str] | None = None, timeout: float = 900) -> dict:
    """What rank 0 of a two-rank run of poise.bench.rank_worker prints, with `more` environment."""
    environment = {
        **os.environ,
        **(more or {}),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "poise.bench.rank_worker", name]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=timeout)
        codes = [rank.wait(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise Error(f"[bench] the ranks of {name} ended with {codes}; what they said is above")
    return json.loads(output.strip().splitlines()[-1])


def _ratio(figure: str, theirs: float, ours: float, aim: float, milliseconds: dict) -> dict:
    return {
        "figure": figure,
        "value": round(theirs / ours, 3),
        "aim": aim,
        "better": "higher",
        **{f"{name}_ms": value for name, value in milliseconds.items()},
    }


def stages_vs_torch() -> Iterator[dict]:
    """A GPT of 3M parameters, accumulation 2, fused AdamW and clip in all of them."""
    ms = _measure("stages")
    replicated = min(ms["ddp"], ms["zero_redundancy"])
    yield _ratio("ddp_stage1", replicated, ms["stage1"], 1.0, ms)
    yield _ratio("ddp_stage2", replicated, ms["stage2"], 1.0, ms)
    yield _ratio("fsdp2_stage3", ms["fsdp2"], ms["stage3"], 1.0, ms)


def stages_vs_deepspeed() -> Iterator[dict]:
    """The same GPT and window by DeepSpeed's engine; nothing where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: no figure (pip install deepspeed)", file=sys.stderr)
        return
    ms = _measure("deepspeed", {"DS_ACCELERATOR": "cpu"})
    for stage in (2, 3):
        yield _ratio(
            f"deepspeed_stage{stage}", ms[f"deepspeed{stage}"], ms[f"stage{stage}"], 1.2, ms
        )


def tiny_stage2() -> Iterator[dict]:
    """2,000 parameters of 16 to 256 elements at stage 2, against DDP."""
    ms = _measure("tiny")
    yield _ratio("ddp_tiny", ms["ddp"], ms["stage2"], 1.0, ms)
    yield {
        "figure": "host_us_per_param",
        "value": round(1e3 * ms["stage2"] / 2000, 2),
        "aim": round(1e3 * ms["ddp"] / 2000, 2),
        "better": "lower",
    }


def cost_of_stages() -> Iterator[dict]:
    """25M parameters, all stages: largest relative error of bytes held and bytes sent against theory."""
    for figure, value in _measure("cost").items():
        yield {"figure": figure, "value": round(value, 5), "aim": 0.01, "better": "lower"}
