"""`poise.plan`: what a model will hold and how fast it will be, before anything is allocated.

A model of your own is traced with tensors that have no memory (poise.fake_trace) at two micro-batches;
a known one is described by its name. The search and the formulas are those of `poise plan`
(docs/planner.md).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from poise import _C, fake_trace, model_view, trace
from poise._C import Error, PlanJob, PlanLink, PlanTraced, format_bytes, parse_bytes
from poise.fake_trace import Traced

logger = logging.getLogger("poise")

ALIGNMENT = 256  # elements that a parameter's place is a multiple of
_PRECISIONS = {  # name: dtype of forward, of parameters
    "fp32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "bf16-autocast": ("bf16", "fp32"),
}
_OFFLOADS = {  # optimizer, gradients, parameters
    "host": (["none"] * 3, ["host", "none", "none"], ["host", "host", "none"], ["host"] * 3),
    "file": (
        ["none"] * 3,
        ["file", "none", "none"],
        ["file", "host", "none"],
        ["file", "host", "file"],
    ),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run an update and what it takes on each rank.

    Attributes:
      micro_batch, accumulation, ranks: samples of a forward, micro-batches of an update, ranks.
      stage, keep_gathered: of ZeRO.
      recomputed: names of the blocks that recompute their activations.
      selective: whether those keep what matrix products and attention made.
      loss_chunk_tokens: tokens of a chunk of logits; 0: whole.
      offload: where optimizer states, gradients and parameters lie: none, host, file.
      peak_bytes: highest of an update, or while the engine is built.
      peak_moment: of the update, for example "backward of blocks.3".
      held, at_peak: bytes by account between updates, and at the peak of an update.
      seconds: of an update ("update") and its parts.
      settings: the keys of a run.json (or of an Engine's configuration) that follow the plan.
    """

    micro_batch: int
    accumulation: int
    ranks: int
    stage: int
    keep_gathered: bool
    recomputed: list[str]
    selective: bool
    loss_chunk_tokens: int
    offload: dict[str, str]
    peak_bytes: int
    peak_moment: str
    held: dict[str, int]
    at_peak: dict[str, int]
    seconds: dict[str, float]
    settings: dict[str, Any]
    _found: _C.PlanFound = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Lever:
    """What else would lower the need; `changes_numbers`: the training would be another one."""

    name: str
    setting: str
    changes_numbers: bool
    fits: bool
    plan: Plan


@dataclasses.dataclass(frozen=True)
class Cost:
    """In the price's currency: of a month of 730 hours, and of a billion tokens (or samples)."""

    month: float
    billion_tokens: float


@dataclasses.dataclass(frozen=True)
class PlanAnswer:
    """What poise.plan found.

    Attributes:
      fits: whether any plan fits the budget.
      best: the fastest that fits; where none does the one of least memory.
      front: no plan is both faster and smaller; fastest first.
      runner_up: the fastest of another stage or micro-batch; None where there is no other.
      why: the runner-up lost.
      budget_bytes, floor_bytes: of each rank; the floor is the least budget that some plan fits.
      missing_bytes: how much the budget is below the floor.
      dominated_by: where nothing fits, the account that is most of the floor.
      candidates: how many plans were compared.
      traced_by: "fake tensors", "a measured micro-batch" or "a description".
      notes: what was assumed.
      cost: where a price was given.
    """

    fits: bool
    best: Plan
    front: list[Plan]
    runner_up: Plan | None
    why: str
    budget_bytes: int
    floor_bytes: int
    missing_bytes: int
    dominated_by: str
    candidates: int
    traced_by: str
    notes: list[str]
    cost: Cost | None
    _job: PlanJob = dataclasses.field(repr=False, compare=False)
    _units: list[str] = dataclasses.field(repr=False, compare=False)

    def levers(self) -> list[Lever]:
        """What else would lower the need, each alone and searched anew; nothing is done unasked."""
        return [
            Lever(
                lever.name,
                lever.setting,
                lever.changes_numbers,
                lever.fits,
                _plan(lever.plan, self._units),
            )
            for lever in _C.plan_levers(self._job)
        ]

    def moments(self, plan: Plan | None = None) -> list[tuple[str, dict[str, int]]]:
        """The moments of an update in their order, with the bytes of each account."""
        return _C.plan_moments(self._job, (plan or self.best)._found)

    def __str__(self) -> str:
        best = self.best
        parts = [
            f"{'fits' if self.fits else 'does not fit'} {format_bytes(self.budget_bytes)}: micro-batch "
            f"{best.micro_batch} x accumulation {best.accumulation} x ranks {best.ranks}",
            f"stage {best.stage}" if best.ranks > 1 else "",
            f"{len(best.recomputed)} blocks recomputed",
            f"{format_bytes(best.peak_bytes)} in the {best.peak_moment}",
            f"{best.seconds['update']:.3g} s an update",
        ]
        return "; ".join(part for part in parts if part)


def plan(
    model: nn.Module | str,
    sample: Any,
    *,
    global_batch_size: int,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    gpus: str = "1xCPU",
    ranks_per_node: int = 8,
    node_link: float = 0,
    network: float = 0,
    memory_budget: int | str | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    momentum: float = 0.0,
    units: model_view.UnitChoice = None,
    stages: Sequence[int] = (),
    offload: str | None = None,
    micro_batch_size: int | None = None,
    separable_loss: bool | None = None,
    gpu_hour: float = 0,
    utilisation: float = 1.0,
) -> PlanAnswer:
    """Finds the fastest plan that fits, without allocating the model.

    Args:
      model: any module, also on the meta device; or the name of a known transformer.
      sample: a batch of the longest kind, with a first dimension of samples in every tensor that has
        one per sample; its values are not looked at. For a known transformer: tokens of a sequence.
      global_batch_size: samples of one update on all ranks; always kept.
      loss_fn: gives the scalar loss of a batch, running `model`; None: `model(**batch)` (or
        `model(*batch)`, `model(batch)`), its `.loss`, or the mean of what it returns.
      gpus: count and device: "8xH100-80GB", "4xCPU".
      ranks_per_node: devices of a node.
      node_link, network: GB/s between devices of a node and of each to other nodes; 0: the device's.
      memory_budget: bytes of each rank, or a text such as "20GiB"; None: the device's memory.
      precision: fp32, bf16 (16-bit parameters, fp32 masters) or bf16-autocast.
      optimizer: adamw, adam or sgd; `momentum` is sgd's.
      units: as for Engine: what is recomputed and gathered as one.
      stages: of ZeRO that may be chosen; empty: all.
      offload: "host" or "file": states, gradients and parameters may lie there.
      micro_batch_size: fixed instead of searched.
      separable_loss: whether the loss may be split over micro-batches; None: unless the model has
        BatchNorm layers, whose micro-batch stays that of the sample.
      gpu_hour, utilisation: price of a device by the hour and the share of paid hours that train.

    Returns:
      The best plan, the front of time against memory, the runner-up and why it lost, and for an
      impossible budget what is missing; `levers()` says what else would help.

    Raises:
      Error: for a batch that cannot be split over the ranks (with the nearest that can), an unknown
        device or model (with the known ones), a precision or place that is none.
    """
    if precision not in _PRECISIONS:
        raise Error(f"[plan] unknown precision {precision!r}; use one of {', '.join(_PRECISIONS)}")
    if offload is not None and offload not in _OFFLOADS:
        raise Error(f"[plan] unknown place to offload to: {offload!r}; use host or file")
    job = PlanJob()
    job.run_on(gpus, ranks_per_node, node_link * 1e9, network * 1e9)
    job.compute_in(*_PRECISIONS[precision])
    job.optimize_with(optimizer, momentum)
    job.global_batch = global_batch_size
    job.stages = list(stages)
    job.micro_batch = micro_batch_size or 0
    job.threads = torch.get_num_threads()
    if memory_budget is not None:
        job.budget = parse_bytes(memory_budget) if isinstance(memory_budget, str) else memory_budget
    if offload is not None:
        job.may_offload(_OFFLOADS[offload])
    notes: list[str] = []
    if isinstance(model, str):
        if not isinstance(sample, int) or sample < 1:
            raise Error(
                f"[plan] the sample of {model} is {sample!r}; give the tokens of a sequence"
            )
        job.describe(model)
        job.sequence = sample
        return _answer(job, [], "a description", notes, gpu_hour, utilisation)
    blocks = fake_trace.blocks_of(model, units)
    mine = max(1, global_batch_size // job.ranks)
    if job.micro_batch == 0 and not _may_split(model, separable_loss):
        job.micro_batch = _kept_micro_batch(mine, _rows(sample), notes)
    sizes = _sizes(mine, job.micro_batch or None)
    traced, how = _traced(model, sample, loss_fn, blocks, precision, sizes, notes)
    job.trace(type(model).__name__, traced)
    job.sequence = 1  # of the batch's samples
    names = [name for name, _ in blocks]
    return _answer(job, names, how, notes, gpu_hour, utilisation)


def _answer(
    job: PlanJob, units: list[str], how: str, notes: list[str], gpu_hour: float, utilisation: float
) -> PlanAnswer:
    found = _C.plan_search(job)
    best = _plan(found.best, units)
    cost = None
    if gpu_hour > 0:
        tokens = job.global_batch * job.sequence
        cost = Cost(*_C.plan_cost(found.best, tokens, gpu_hour, utilisation))
    return PlanAnswer(
        found.fits,
        best,
        [_plan(one, units) for one in found.front],
        None if found.runner_up is None else _plan(found.runner_up, units),
        found.why,
        found.budget,
        found.floor,
        max(0, found.floor - found.budget),
        found.dominated_by,
        found.candidates,
        how,
        notes,
        cost,
        job,
        units,
    )


def _plan(found: _C.PlanFound, units: list[str]) -> Plan:
    flags = found.recomputed
    names = units or [f"blocks.{i}" for i in range(len(flags))]
    settings = json.loads(_C.plan_settings(found, units))
    if len(flags) == 1 and len(names) > 1:  # seen as one link
        flags = flags * len(names)
        if flags[0]:
            settings["checkpointing"] = {"policy": "every_n", "n": 1}
    return Plan(
        found.micro_batch,
        found.accumulation,
        found.ranks,
        found.stage,
        found.keep_gathered,
        [name for name, flag in zip(names, flags, strict=False) if flag],
        found.selective,
        found.loss_chunk_tokens,
        dict(found.offload),
        found.peak_bytes,
        found.peak_moment,
        dict(found.held),
        dict(found.at_peak),
        dict(found.seconds),
        settings,
        found,
    )


def _traced(
    model: nn.Module,
    sample: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    blocks: list[tuple[str, nn.Module]],
    precision: str,
    sizes: list[int],
    notes: list[str],
) -> tuple[PlanTraced, str]:
    """The model at so many samples."""
    loss_of = loss_fn or _loss_of(model)
    runs: dict[tuple[int, bool], Traced] = {}
    how = "fake tensors"
    dtype = torch.bfloat16 if precision == "bf16" else None
    autocast = torch.bfloat16 if precision == "bf16-autocast" else None
    try:
        for size in sizes:
            for recomputed in (False, True):
                runs[size, recomputed] = fake_trace.trace(
                    model,
                    loss_of,
                    _resized(sample, size),
                    blocks=blocks,
                    recomputed=recomputed,
                    dtype=dtype,
                    autocast=autocast,
                )
    except fake_trace.Untraceable as error:
        how = "a measured micro-batch"
        notes.append(f"{error}; a copy of it was run on real samples instead")
        logger.warning("%s", notes[-1])
        sizes = sizes[:2]
        runs = _measured(model, sample, loss_fn, units_of(blocks), precision, sizes)
    flats, rest, places = _flats(model, blocks)
    names = runs[sizes[0], False].names
    links = [
        [
            _link(runs[size, False], runs[size, True], i, places, is_block=len(names) > 1)
            for i in range(len(names))
        ]
        for size in sizes
    ]
    return PlanTraced(flats, rest, sizes, links), how


def _sizes(most: int, fixed: int | None) -> list[int]:
    """Micro-batches to trace: peaks bend where activations outgrow gradients of weights."""
    if fixed is not None:
        return [fixed]
    return sorted({size for size in (1, 2, 4, 16, 64) if size < most} | {most})


def units_of(blocks: list[tuple[str, nn.Module]]) -> list[str]:
    """Names of the blocks, as Engine's `units` takes them."""
    return [name for name, _ in blocks]


def _link(
    kept: Traced, again: Traced, i: int, places: dict[str, int], *, is_block: bool
) -> PlanLink:
    name = kept.names[i]
    inside = is_block and 0 < i < len(kept.names) - 1
    # A model seen as one link recomputes all of its blocks or none.
    block = inside or (not is_block and bool(places))
    return PlanLink(
        name,
        places.get(name, -1),
        block,
        _bytes(kept.links[i]),
        _bytes((again if block else kept).links[i]),
        kept.flops[i],
        kept.moved[i],
    )


def _bytes(link: trace.Link) -> list[int]:
    return [link.saved, link.forward_peak, link.backward_peak]


def _flats(
    model: nn.Module, blocks: list[tuple[str, nn.Module]]
) -> tuple[list[tuple[str, int, int]], int, dict[str, int]]:
    """(name, elements that train, frozen ones) of each block and of the rest; places by name."""
    seen: set[int] = set()
    flats: list[tuple[str, int, int]] = []
    places = {}

    def add(name: str, parameters: Any) -> None:
        sizes = [0, 0]
        for parameter in parameters:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            sizes[not parameter.requires_grad] += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        flats.append((name, *sizes))

    for name, module in blocks:
        places[name] = len(flats)
        add(name, module.parameters())
    add("rest", model.parameters())
    return flats, len(flats) - 1, places


def _loss_of(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    def loss(batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("loss")
        if found is None:
            found = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        return found.float().mean()

    return loss


def _rows(sample: Any) -> int:
    for leaf in tree_leaves(sample):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise Error("[plan] the sample holds no tensor with samples; give a batch of the data")


def _resized(sample: Any, size: int) -> Any:
    """As many samples, of the meta device: shapes and types alone."""
    rows = _rows(sample)

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if shape and shape[0] == rows:
            shape[0] = size
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    return tree_map(resize, sample)


def _may_split(model: nn.Module, separable: bool | None) -> bool:
    if separable is not None:
        return separable
    return not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def _kept_micro_batch(mine: int, rows: int, notes: list[str]) -> int:
    size = max(n for n in range(1, min(rows, mine) + 1) if mine % n == 0)
    notes.append(
        f"the model has BatchNorm layers, which see one micro-batch: it stays {size}, that of the "
        "sample; separable_loss=True releases it"
    )
    return size


def _measured(
    model: nn.Module,
    sample: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    units: list[str],
    precision: str,
    sizes: list[int],
) -> dict[tuple[int, bool], Traced]:
    """Real micro-batches of a copy of the model, with all blocks recomputed and with none."""
    from poise.engine import Engine

    if loss_fn is not None:
        raise Error(
            "[plan] the model cannot run without data and a loss_fn of its own cannot be given a "
            "copy of it; give a model that returns its loss, or plan with poise.Trainer, which "
            "measures the model itself"
        )
    copied = copy.deepcopy(model)
    dtype, parameters = _PRECISIONS[precision]
    engine = Engine(copied, {"precision": {"dtype": dtype, "parameters": parameters}}, units=units)
    loss_of = _loss_of(copied)
    rows, runs = _rows(sample), {}
    names = ["the embedding", *units, "the head"]
    flops = 2.0 * sum(p.numel() for p in model.parameters())
    for size in sizes:
        batch = tree_map(
            lambda leaf, size=size: (
                leaf[[i % rows for i in range(size)]]
                if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
                else leaf
            ),
            sample,
        )
        for recomputed in (False, True):
            policy = {"policy": "first_m", "n": len(units)} if recomputed and units else None
            engine.set_checkpointing(policy or {"policy": "none"})
            found = trace.measure(engine, batch, lambda b: (loss_of(b), 1))
            links = found.links
            shown = names if len(links) == len(names) else ["the model"]
            each = [size * flops / len(links)] * len(links)
            runs[size, recomputed] = Traced(shown, links, each, [0.0] * len(links))
    return runs
