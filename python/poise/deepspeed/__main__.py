"""`python -m poise.deepspeed --hostfile hosts train.py ...`: starts a script on all ranks of all machines, as
the command `deepspeed` does; torchrun starts those of each machine, ssh reaches the others."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from poise._C import Error
from poise.deepspeed import hosts
from poise.deepspeed.hosts import Host

HOSTFILE = "/job/hostfile"  # DeepSpeed's, where there is one


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        machines = _machines(options)
    except Error as error:
        print(f"poise: error: {error}", file=sys.stderr)
        return 1
    script = [options.script, *options.arguments]
    if options.module:
        script = ["-m", *script]  # which gets no --local_rank: torchrun's environment has it
    elif not options.no_local_rank:
        script = ["-m", "poise.deepspeed.local_rank", *script]
    first = machines[0]
    address = options.master_addr or ("127.0.0.1" if len(machines) == 1 else first.name)
    nodes = range(len(machines)) if options.node_rank is None else [options.node_rank]
    return _run(
        [hosts.command(machines, node, address, options.master_port, script) for node in nodes]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m poise.deepspeed", description=__doc__)
    parser.add_argument("-H", "--hostfile", help=f"lines 'name slots=8'; default: {HOSTFILE}")
    parser.add_argument("-i", "--include", default="", help="'a@b:0,2': those machines and slots")
    parser.add_argument("-e", "--exclude", default="", help="all but those")
    parser.add_argument("--num_nodes", type=int, help="the first so many machines")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, help="ranks of each machine")
    parser.add_argument("--master_addr", help="default: the first machine")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument(
        "--node_rank", type=int, help="only this machine's ranks: you start the others, without ssh"
    )
    parser.add_argument("--no_ssh", action="store_true", help="as --node_rank says; accepted")
    parser.add_argument("--module", action="store_true", help="the script is a module's name")
    parser.add_argument(
        "--no_local_rank", action="store_true", help="the script gets no --local_rank"
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _machines(options: argparse.Namespace) -> list[Host]:
    path = options.hostfile
    if path is None and not Path(HOSTFILE).exists():
        machines = [Host("localhost", tuple(range(max(1, torch.cuda.device_count()))))]
        if options.num_gpus:
            machines = [Host("localhost", tuple(range(options.num_gpus)))]
    else:
        machines = hosts.read(path or HOSTFILE)
    machines = hosts.chosen(machines, options.include, options.exclude)
    if options.num_nodes:
        machines = machines[: options.num_nodes]
    if options.num_gpus:
        few = [host.name for host in machines if len(host.slots) < options.num_gpus]
        if few:
            raise Error(f"[deepspeed] --num_gpus {options.num_gpus}, but {few[0]} has fewer slots")
        machines = [
            Host(h.name, h.slots[: options.num_gpus], len(h.slots) > options.num_gpus or h.chosen)
            for h in machines
        ]
    if options.node_rank is not None and not 0 <= options.node_rank < len(machines):
        raise Error(
            f"[deepspeed] --node_rank {options.node_rank}; there are {len(machines)} machines"
        )
    return machines


def _run(commands: list[list[str]]) -> int:
    """Waits for all; where one fails the others are ended, and its status is returned."""
    started = [subprocess.Popen(command) for command in commands]
    try:
        while True:
            codes = [process.poll() for process in started]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.1)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
