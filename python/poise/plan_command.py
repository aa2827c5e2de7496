"""`poise plan run.json` of a model of Python: traced without memory, searched like a described one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, NoReturn

from poise import imported, planning, run_data, separable, traced_model
from poise._batch import repeated
from poise._C import Error, budget_text, format_bytes
from poise.config import settings_of
from poise.model_call import ModelCall
from poise.planning import Plan, PlanAnswer
from poise.run_file import RunFile
from poise.seeding import seed_everything
from poise.trainer_balance import USUAL_MICRO_BATCH

ROWS = 8  # of the front that are printed at most, and the chosen one
SEARCHED = ("batch.micro_batch_size", "batch.accumulation", "checkpointing.policy")


class WrongArguments(Exception):
    """Not these: the C++ command line says what is wrong."""


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongArguments(message)


def arguments_of(given: list[str]) -> argparse.Namespace:
    """Those that a model of Python can be planned with."""
    parser = _Arguments(add_help=False, allow_abbrev=False)
    parser.add_argument("file")
    parser.add_argument("--gpus", default="1xCPU")
    parser.add_argument("--per-node", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--node-link", type=float, default=0)
    parser.add_argument("--network", type=float, default=0)
    parser.add_argument("--machine", default="")
    parser.add_argument("--memory")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--shard-ranks", type=int)
    parser.add_argument("--price", type=float, default=0)
    parser.add_argument("--utilisation", type=float, default=1)
    parser.add_argument("--levers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html")
    options = parser.parse_args(given)
    if options.nodes and options.per_node:
        raise WrongArguments
    return options


def plan(file: RunFile, options: argparse.Namespace) -> int:
    """Prints the answer; returns 0, or 1 where no plan fits."""
    answer = _answer(file, options)
    levers = answer.levers() if options.levers or not answer.fits else []
    if options.html:
        _write(options.html, answer.html())
    if options.json:
        print(json.dumps(_document(answer, levers), indent=2))
    else:
        print("\n".join(_lines(answer, levers)))
    return 0 if answer.fits else 1


def _write(path: str, page: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise Error(
            f"[plan] cannot write {path}: {error.strerror}; give another file with --html"
        ) from None


def _answer(file: RunFile, options: argparse.Namespace) -> PlanAnswer:
    settings = settings_of(file.config)
    batch, precision = settings["batch"], settings["precision"]
    kinds = ("optimizer", "gradients", "parameters", "activations")
    if any(settings["offload"][kind] != "none" for kind in kinds):
        raise Error(
            "[plan] the run offloads, which is not planned for a model of Python; call "
            "poise.plan(..., offload=...) instead"
        )
    seed_everything(settings["engine"]["seed"])
    made = imported.load(file.function, file.arguments, file.path.parent)
    size, count = batch["micro_batch_size"], batch["accumulation"]
    batch["micro_batch_size"] = 1
    data = run_data.of_run(made, settings, 1, file.given)
    call = ModelCall(made.model, shift_labels=data.shift_labels)
    known = separable.why_not_split(made.model, None, own_loss=True, came_counted=lambda: False)
    answer = planning.plan(
        made.model,
        repeated(next(data.windows)[0], USUAL_MICRO_BATCH),  # kept where the loss may not be split
        global_batch_size=batch["global_batch_size"] or max(1, size) * max(1, count),
        loss_fn=lambda inputs: call.loss_and_outputs(inputs)[0],
        separable_loss=True if known is None else None,  # else the loss says it
        gpus=options.gpus,
        ranks_per_node=options.per_node,
        nodes=options.nodes,
        node_link=options.node_link,
        network=options.network,
        machine=options.machine,
        memory_budget=options.memory or settings["memory"]["budget_bytes"] or None,
        precision=traced_model.precision_of(precision),
        optimizer=settings["optimizer"]["type"],
        momentum=settings["optimizer"]["momentum"],
        moments=settings["optimizer"]["moments"],
        stages=[settings["zero"]["stage"]] if settings["zero"]["stage"] else [],
        shard_ranks=options.shard_ranks,
        micro_batch_size=options.micro_batch or None,
        gpu_hour=options.price,
        utilisation=options.utilisation,
    )
    searched = [name for name in SEARCHED if name in file.given]
    if not searched:
        return answer
    note = f"searched for, whatever the file says of it: {', '.join(searched)}"
    return dataclasses.replace(answer, notes=[*answer.notes, note])


def _row(plan: Plan, mark: str) -> str:
    return (
        f"  {plan.seconds['update']:10.3g} s {format_bytes(plan.peak_bytes):>12}   micro-batch "
        f"{plan.micro_batch}, stage {plan.stage}, {len(plan.recomputed)} recomputed{mark}"
    )


def _lines(answer: PlanAnswer, levers: list[planning.Lever]) -> list[str]:
    best = answer.best
    lines = [f"traced by {answer.traced_by}", *answer.notes, str(answer), ""]
    lines.append("  account              held          at the peak")
    lines += [
        f"  {name:14} {format_bytes(best.held[name]):>14} {format_bytes(peak):>14}"
        for name, peak in best.at_peak.items()
        if peak or best.held[name]
    ]
    lines += ["", "Time against memory (no plan is both faster and smaller):"]
    step = -(-len(answer.front) // ROWS)
    shown = [one for i, one in enumerate(answer.front) if i % step == 0 or one == best]
    for one in shown:
        fits = one.peak_bytes <= answer.budget_bytes
        mark = " <- chosen" if one == best else "" if fits else " (does not fit)"
        lines.append(_row(one, mark))
    if answer.runner_up is not None:
        lines.append(f"Next best, slower by {answer.why}:")
        lines.append(_row(answer.runner_up, ""))
    lines += [
        f"  {'another training' if lever.changes_numbers else 'the same training'}: {lever.name} "
        f"({lever.setting}): {format_bytes(lever.plan.peak_bytes)}{'' if lever.fits else ' (does not fit)'}"
        for lever in levers
    ]
    if answer.cost is not None:
        lines.append(
            f"{answer.cost.month:.0f} a month, {answer.cost.billion_tokens:.2f} per billion samples"
        )
    return [*lines, "", f"In a run.json: {json.dumps(best.settings)}"]


def _document(answer: PlanAnswer, levers: list[planning.Lever]) -> dict[str, Any]:
    def public(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value) if not f.name.startswith("_")]
            return {name: public(getattr(value, name)) for name in names}
        if isinstance(value, list):
            return [public(one) for one in value]
        return value

    moments = [{"moment": name, "accounts": bytes_} for name, bytes_ in answer.moments()]
    nearest = {} if answer.fits else {"nearest_budget": budget_text(answer.floor_bytes)}
    return {**public(answer), **nearest, "moments": moments, "levers": public(levers)}
