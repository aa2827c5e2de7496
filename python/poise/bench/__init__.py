"""The measurements behind `poise bench`: one line per figure, with the aim it is held to."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

# Name -> module:function, which yields one dict per figure.
_MEASUREMENTS = {
    "optimizer_stage": "poise.bench.optimizer:optimizer_stage",
    "tiny_params": "poise.bench.optimizer:tiny_params",
    "step_vs_torch": "poise.bench.step:step_vs_torch",
    "cpp_vs_python": "poise.bench.step:cpp_vs_python",
    "peak_flat": "poise.bench.step:peak_flat",
    "counting_allocator_overhead": "poise.bench.ledger:counting_allocator_overhead",
    "hf_trainer": "poise.bench.hf:hf_trainer",
    "offload_update": "poise.bench.offload:offload_update",
    "file_store": "poise.bench.offload:file_store",
    "file_overlap": "poise.bench.offload:file_overlap",
    "save_and_load": "poise.bench.state:save_and_load",
    "async_stall": "poise.bench.state:async_stall",
    "stages_vs_torch": "poise.bench.ranks:stages_vs_torch",
    "stages_vs_deepspeed": "poise.bench.ranks:stages_vs_deepspeed",
    "tiny_stage2": "poise.bench.ranks:tiny_stage2",
    "cost_of_stages": "poise.bench.ranks:cost_of_stages",
    "plan": "poise.bench.planning:plan",
    "plan_search": "poise.bench.planning:plan_search",
}
_MEANINGS = {
    "optimizer_stage": "the optimizer's update against torch's and against moving its bytes",
    "tiny_params": "the same for very many very small parameters",
    "step_vs_torch": "a plain torch loop's time of a small GPT's update over poise's",
    "cpp_vs_python": "time of an update driven from Python over one driven from C++",
    "peak_flat": "peak bytes of 32 micro-batches over those of one",
    "counting_allocator_overhead": "time of a step whose memory is counted over one that is not",
    "hf_trainer": "transformers' Trainer against poise's: time of an update, peak bytes",
    "offload_update": "the update of states on the host against torch's and against moving bytes",
    "file_store": "the file store against plain reads and writes, past and through the page cache",
    "file_overlap": "an update with states in a file over the largest of its parts alone",
    "save_and_load": "saves of 1 GB over a loop that only writes, and over torch.save and torch.load",
    "async_stall": "how long an asynchronous save holds the training up, over a save",
    "stages_vs_torch": "two ranks: stages 1 to 3 against DDP, its sharded optimizer, and FSDP2",
    "stages_vs_deepspeed": "two ranks: stages 2 and 3 against DeepSpeed, where it is installed",
    "tiny_stage2": "two ranks: stage 2 of very many very small parameters against DDP",
    "plan": "predicted bytes and seconds of 60 balances of four models against running them",
    "plan_search": "seconds that `poise plan` takes for 32 layers, and for 126 on 1,024 GPUs",
    "cost_of_stages": "two ranks: bytes held and sent by each stage against the formulas",
}


def reaches_aim(figure: dict) -> bool:
    if figure["better"] == "higher":
        return figure["value"] >= figure["aim"]
    return figure["value"] <= figure["aim"]


def _readable(figure: dict) -> str:
    sign = ">=" if figure["better"] == "higher" else "<="
    verdict = "reached" if reaches_aim(figure) else "NOT reached"
    return f"{figure['figure']:28} {figure['value']:8.3f}   aim {sign} {figure['aim']:<6} {verdict}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="poise bench",
        description="Measures what the README claims; one line per figure, beside its aim.",
        epilog="figures:\n" + "\n".join(f"  {n:28}{_MEANINGS[n]}" for n in _MEASUREMENTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures; without any: all")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--out", default="out/bench/bench.jsonl", help="file the lines go to")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in _MEASUREMENTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(_MEASUREMENTS)}")
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for name in options.names or _MEASUREMENTS:
            module, function = _MEASUREMENTS[name].split(":")
            for figure in getattr(importlib.import_module(module), function)():
                file.write(json.dumps(figure) + "\n")
                file.flush()
                print(json.dumps(figure) if options.json else _readable(figure), flush=True)
    return 0
