"""`poise.plan`: what a model will hold and how fast it will be, before anything is allocated.

A model of your own is traced with tensors that have no memory (poise.fake_trace) at two micro-batches;
a known one is described by its name. The search and the formulas are those of `poise plan`
(docs/planner.md).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from poise import _C, fake_trace, generators, model_view, traced_model
from poise._C import Error, PlanJob, format_bytes, parse_bytes
from poise.inside_operators import Inside
from poise.planned_loss import PlannedLoss
from poise.traced_model import PRECISIONS

_PLACES = ("none", "host", "file")


def _offloads(place: str) -> list[list[str]]:
    """Where optimizer states, gradients, parameters and activations may lie, each on top of those before;
    activations with any of them."""
    states = [
        ["none"] * 3,
        [place, "none", "none"],
        [place, "host", "none"],
        [place, "host", place],
    ]
    return [[*there, kept] for there in states for kept in ("none", place)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run an update and what it takes on each rank.

    Attributes:
      micro_batch, accumulation, ranks: samples of a forward, micro-batches of an update, ranks.
      stage, keep_gathered: of ZeRO.
      shard_ranks: ranks of a group that shards, replicated by the other groups (poise.comm.hybrid).
      recomputed: names of the blocks that recompute their activations.
      selective: whether those keep what matrix products and attention made.
      loss_chunk_tokens: tokens of a chunk of logits; 0: whole.
      offload: where optimizer states, gradients, parameters and activations lie: none, host, file.
      peak_bytes: highest of an update, or while the engine is built.
      peak_moment: when that is, for example "backward of blocks.3" or "building of the engine".
      held, at_peak: bytes by account between updates, and at the peak of an update.
      seconds: of an update ("update") and its parts.
      settings: the keys of a run.json (or of an Engine's configuration) that follow the plan.
    """

    micro_batch: int
    accumulation: int
    ranks: int
    shard_ranks: int
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
    _found: _C.PlanAnswer = dataclasses.field(repr=False, compare=False)
    _price: tuple[float, float] = dataclasses.field(repr=False, compare=False)

    def html(self) -> str:
        """A page with drawings: memory over an update, time against memory, what each lever buys."""
        levers = _C.plan_levers(self._job)
        return _C.plan_page(self._job, self._found, levers, *self._price, self._units)

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

    def misfit(self) -> str:
        """Where nothing fits: the floor, what most of it is, the nearest budget that works, and which
        levers would fit; else empty."""
        return "" if self.fits else _C.plan_misfit(self._job, self._found)

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
            self.misfit(),
        ]
        return "; ".join(part for part in parts if part)


def plan(
    model: nn.Module | str,
    sample: Any,
    *,
    global_batch_size: int,
    loss_fn: Callable[[Any], Any] | None = None,
    gpus: str = "1xCPU",
    ranks_per_node: int = 8,
    node_link: float = 0,
    network: float = 0,
    nodes: int = 0,
    machine: str = "",
    memory_budget: int | str | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    momentum: float = 0.0,
    moments: str = "fp32",
    units: model_view.UnitChoice = None,
    stages: Sequence[int] = (),
    shard_ranks: int | None = None,
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
      loss_fn: gives the loss of a batch, running `model`, in any form that Engine.step takes; None:
        `model(**batch)` (or `model(*batch)`, `model(batch)`), its `.loss`, or the mean of what it
        returns.
      gpus: count and device: "8xH100-80GB", "4xCPU"; a JSON file that describes one: "8xdevice.json";
        the GPU that `poise plan --calibrate` measured: "1xthis".
      ranks_per_node: devices of a node.
      node_link, network: GB/s between devices of a node and of each to other nodes; 0: the device's.
      nodes: of so many devices as `gpus` says; 0: all that it says are there, `ranks_per_node` to a node.
      machine: a file that `poise plan --calibrate` wrote; "": the usual one, where there is one.
      memory_budget: bytes of each rank, or a text such as "20GiB"; None: the device's memory.
      precision: fp32, bf16 or fp16 (16-bit parameters, fp32 masters), bf16-autocast or fp16-autocast.
      optimizer: as in the configuration (docs/config.md); `momentum` is sgd's, `moments` (fp32, bf16,
        8bit) adam's and adamw's.
      units: as for Engine: what is recomputed and gathered as one.
      stages: of ZeRO that may be chosen; empty: all.
      shard_ranks: ranks of a group that shards, replicated by the other groups; None: all ranks, or
        those of a node.
      offload: "host" or "file": states, gradients, parameters and activations may lie there.
      micro_batch_size: fixed instead of searched.
      separable_loss: whether the loss may be split over micro-batches; None: where it is known to be a
        mean or a sum over tokens or samples (the head of a transformers model, a loss that comes with
        its count, a value of each sample) and the model has no BatchNorm. Else the micro-batch stays
        that of the sample, which a note says.
      gpu_hour, utilisation: price of a device by the hour and the share of paid hours that train.

    Returns:
      The best plan, the front of time against memory, the runner-up and why it lost, and for an
      impossible budget what is missing; `misfit()` says the nearest budget that works and which of
      `levers()` would fit.

    Raises:
      Error: for a batch that cannot be split over the ranks (with the nearest that can), an unknown
        device or model (with the known ones), a precision or place that is none; for loss_fn, units or
        separable_loss beside a model's name.
    """
    if precision not in PRECISIONS:
        raise Error(f"[plan] unknown precision {precision!r}; use one of {', '.join(PRECISIONS)}")
    if offload is not None and offload not in _PLACES[1:]:
        raise Error(f"[plan] unknown place to offload to: {offload!r}; use host or file")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise Error(
            f"[plan] micro_batch_size is {micro_batch_size}; give 1 or more, or None for a search"
        )
    job = PlanJob()
    job.run_on(gpus, ranks_per_node, nodes, node_link, network, machine)
    job.compute_in(*PRECISIONS[precision])
    job.optimize_with(optimizer, momentum, moments)
    job.global_batch = global_batch_size
    job.stages = list(stages)
    job.shard_ranks = [] if shard_ranks is None else [shard_ranks]
    job.micro_batch = micro_batch_size or 0
    job.run_on_this_cpu()
    if memory_budget is not None:
        job.budget = parse_bytes(memory_budget) if isinstance(memory_budget, str) else memory_budget
    if offload is not None:
        job.may_offload(_offloads(offload))
    notes: list[str] = []
    if isinstance(model, str):
        if not isinstance(sample, int) or sample < 1:
            raise Error(
                f"[plan] the sample of {model} is {sample!r}; give the tokens of a sequence"
            )
        its_own = {"loss_fn": loss_fn, "units": units, "separable_loss": separable_loss}
        if given := [name for name, value in its_own.items() if value is not None]:
            raise Error(
                f"[plan] {', '.join(given)} with {model}, a known transformer, whose loss and blocks are "
                "known, too; leave it out, or give a module"
            )
        job.describe(model)
        job.sequence = sample
        return _answer(job, [], "a description", notes, gpu_hour, utilisation)
    blocks = fake_trace.blocks_of(model, units)
    mine = max(1, global_batch_size // job.ranks)
    own = model_view.device_of(model)  # the loss's, too
    device = own if own.type == "cuda" else fake_trace.CPU
    loss = PlannedLoss(model, loss_fn)
    with generators.untouched():  # a copy that runs for real draws numbers, and a script goes on
        if job.micro_batch == 0:
            reason = traced_model.why_not_split(loss, sample, separable_loss, device)
            if reason is not None:
                rows = traced_model.rows_of(sample)
                job.micro_batch = traced_model.kept_micro_batch(mine, rows)
                notes.append(
                    f"{reason}: the micro-batch stays {job.micro_batch}, that of the sample, and the "
                    "other levers are used; separable_loss=True of poise.plan or a Trainer releases it"
                )
        sizes = traced_model.sizes_of(mine, job.micro_batch or None)
        traced, how = traced_model.traced(
            loss,
            sample,
            blocks,
            precision,
            sizes,
            notes,
            away=offload is not None,
            device=device,
            inside=Inside() if job.for_cpus else None,
        )
    if offload is not None and how != "fake tensors":
        job.may_offload([there for there in _offloads(offload) if there[3] == "none"])
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
        found,
        (gpu_hour, utilisation),
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
        found.shard_ranks,
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
