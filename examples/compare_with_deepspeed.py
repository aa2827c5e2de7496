"""Runs examples/deepspeed_script.py by DeepSpeed and, one line changed, by poise; two CPU ranks, stages 1 to 3.

    python examples/compare_with_deepspeed.py

Prints how far the losses, the gradients' norms and the weights at the end are from each other, and both from a
plain torch loop in float64 that takes each update's rows as one batch. Without DeepSpeed it shows poise alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.utils.data import DistributedSampler

HERE = Path(__file__).resolve().parent
SCRIPT, SETTINGS = HERE / "deepspeed_script.py", HERE / "deepspeed_script.json"
THEIRS, OURS = "import deepspeed\n", "import poise.deepspeed as deepspeed\n"
RANKS, STAGES = 2, (1, 2, 3)
SECONDS = 900  # of one run; the first one compiles some of DeepSpeed

Run = tuple[list[dict[str, float]], dict[str, torch.Tensor]]  # of each update; weights at the end


def for_poise(folder: Path) -> Path:
    """The script with its one import replaced."""
    text = SCRIPT.read_text()
    if text.count(THEIRS) != 1:
        raise SystemExit(f"{SCRIPT} has {text.count(THEIRS)} lines {THEIRS!r}; it should have one")
    changed = folder / "script_for_poise.py"
    changed.write_text(text.replace(THEIRS, OURS))
    return changed


def settings(stage: int) -> dict:
    config = json.loads(SETTINGS.read_text())
    config["zero_optimization"]["stage"] = stage
    return config


def command(script: Path, stage: int, folder: Path, options: Sequence[str] = ()) -> list[str]:
    """The script and its arguments; its settings are written into the folder, which gets the results."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "settings.json"
    config.write_text(json.dumps(settings(stage)))
    said = ["--deepspeed", "--deepspeed_config", str(config), "--out", str(folder)]
    return [str(script), *said, *options]


def results(folder: Path) -> Run:
    weights = torch.load(folder / "weights.bin", weights_only=True)
    return json.loads((folder / "updates.json").read_text()), weights


def by_torchrun(script: Path, stage: int, folder: Path, options: Sequence[str] = ()) -> Run:
    """What the script does on two ranks, started as its docstring says."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += ["--nproc-per-node", str(RANKS), *command(script, stage, folder, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"DS_ACCELERATOR": "cpu"}
    with open(folder / "log.txt", "w") as log:
        ended = subprocess.run(
            start, env=environment, stdout=log, stderr=log, timeout=SECONDS, check=False
        )
    if ended.returncode:
        raise SystemExit(
            f"{script.name} at stage {stage} ended with {ended.returncode}; the last lines of "
            f"{folder / 'log.txt'}:\n"
            + "\n".join((folder / "log.txt").read_text().splitlines()[-30:])
        )
    return results(folder)


def plain(script: Path, dtype: torch.dtype, options: Sequence[str] = ()) -> Run:
    """The same training without any engine: all rows of an update are one batch."""
    parts = _module(script)
    args, config = parts.parse(list(options)), json.loads(SETTINGS.read_text())
    torch.manual_seed(args.seed)
    model = parts.Gpt(args.layers, args.width, args.heads, args.length).to(dtype)
    rows = parts.Rows(args.rows, args.length, args.seed)
    chosen = {k: v for k, v in config["optimizer"]["params"].items() if k != "torch_adam"}
    optimizer = torch.optim.AdamW(model.parameters(), **chosen)
    orders = [list(DistributedSampler(rows, RANKS, rank)) for rank in range(RANKS)]
    part = config["train_batch_size"] // RANKS
    updates = []
    for _ in range(args.epochs):
        for first in range(0, len(orders[0]), part):
            optimizer.param_groups[0]["lr"] = _rate(config, len(updates))
            batch = [rows[i] for order in orders for i in order[first : first + part]]
            inputs, labels = (torch.stack(column) for column in zip(*batch, strict=True))
            optimizer.zero_grad()
            loss = model(inputs, labels)
            loss.backward()
            limit = config["gradient_clipping"]
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            following = _rate(config, len(updates) + 1)
            updates.append({"loss": loss.item(), "norm": norm.item(), "next_lr": following})
    return updates, model.state_dict()


def _rate(config: dict, done: int) -> float:
    """Of the update after `done` ones: up in a line, then down in one; a schedule that is made before
    the first update and steps after each is one count behind."""
    params, count = config["scheduler"]["params"], max(0, done - 1)
    warmup, total = params["warmup_num_steps"], params["total_num_steps"]
    rising = count < warmup
    height = count / warmup if rising else max(0.0, (total - count) / (total - warmup))
    low, high = params["warmup_min_lr"], params["warmup_max_lr"]
    return low + (high - low) * height


def _module(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(one: Run, other: Run) -> dict[str, float]:
    """Largest relative ones over the updates; of all weights together, over their length."""
    found = {}
    for name in ("loss", "norm", "next_lr"):
        pairs = [(a[name], b[name]) for a, b in zip(one[0], other[0], strict=True)]
        found[name] = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    squares = [
        ((one[1][name].double() - w.double()).square().sum(), w.double().square().sum())
        for name, w in other[1].items()
    ]
    found["weights"] = math.sqrt(sum(d for d, _ in squares) / sum(w for _, w in squares))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/compare_with_deepspeed")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    changed = for_poise(out)
    exact = plain(changed, torch.float64)
    rows = [("plain float32", "float64", differences(plain(changed, torch.float32), exact))]
    theirs_too = importlib.util.find_spec("deepspeed") is not None
    for stage in STAGES:
        ours = by_torchrun(changed, stage, out / f"poise{stage}")
        rows.append((f"stage {stage}, poise", "float64", differences(ours, exact)))
        if theirs_too:
            theirs = by_torchrun(SCRIPT, stage, out / f"deepspeed{stage}")
            rows.append((f"stage {stage}, DeepSpeed", "float64", differences(theirs, exact)))
            rows.append((f"stage {stage}, poise", "DeepSpeed", differences(ours, theirs)))
    clipped = sum(
        u["norm"] > json.loads(SETTINGS.read_text())["gradient_clipping"] for u in exact[0]
    )
    losses = [update["loss"] for update in exact[0]]
    print(
        f"{len(losses)} updates on {RANKS} ranks, {clipped} of them clipped, loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}; largest relative differences:\n"
    )
    print("| run | over | losses | norms | rates | weights at the end |\n|---|---|---|---|---|---|")
    for run, other, found in rows:
        print(
            f"| {run} | {other} | " + " | ".join(f"{value:.1e}" for value in found.values()) + " |"
        )
    if not theirs_too:
        print("\nDeepSpeed is not installed (pip install deepspeed): poise alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
