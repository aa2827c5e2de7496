"""What a run will hold, told before anything is allocated: from a trace of its model without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from poise import checkpointing, fake_trace, generators, traced_model
from poise._C import PlanAnswer, PlanFound, PlanJob, PlanLink, PlanTraced, format_bytes
from poise._C import plan_search as search
from poise.balance import Candidate
from poise.inside_operators import Inside
from poise.placement import Placement, Task


class Forecast:
    """Plans of a run, from one trace that is made when it is first needed.

    Args:
      task: what the run is.
      model, blocks: and its blocks by name.
      sample_of: makes a batch of the longest kind.
      loss_of: gives the scalar loss of a batch.
      may_split: asked after the trace: whether another micro-batch is the same training.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        blocks: list[tuple[str, nn.Module]],
        sample_of: Callable[[], Any],
        loss_of: Callable[[Any], torch.Tensor],
        may_split: Callable[[], bool] = lambda: True,
    ) -> None:
        self.task, self._model, self._blocks = task, model, blocks
        self._sample_of, self._loss_of, self._may_split = sample_of, loss_of, may_split
        self._held: dict[Placement, int] = {}
        self._made: PlanTraced | None = None
        self._why_not = ""

    def held(self, place: Placement) -> int:
        """Bytes of states on each rank; needs no trace."""
        if place not in self._held:
            flats, rest, _ = traced_model.flats_of(self._model, self._blocks)
            nothing = PlanLink("the model", -1, False, [0, 0, 0], [0, 0, 0], 0, 0)
            job = self._job(place, PlanTraced(flats, rest, [1], [[nothing]]))
            self._held[place] = sum(search(job).best.held.values())
        return self._held[place]

    @property
    def may_split(self) -> bool:
        """Whether another micro-batch is the same training, as far as is known; after a trace."""
        return self._may_split()

    def job(self, place: Placement) -> PlanJob:
        """The run with states laid out like that. Raises fake_trace.Untraceable."""
        job = self._job(place, self._traced)  # which tells whether the loss may be split
        job.micro_batch = 0 if self.may_split else self.task.micro_batch
        if self.task.recomputed is not None:
            job.recompute(self._flags(self.task.recomputed))
        return job

    def answer(self, place: Placement) -> PlanAnswer:
        """What is planned. Raises fake_trace.Untraceable."""
        return search(self.job(place))

    def chosen(self, place: Placement, micro_batch: int, recomputed: int) -> PlanFound:
        """What that micro-batch takes with the first so many blocks recomputed (where the task leaves
        them open). Raises fake_trace.Untraceable."""
        job = self.job(place)
        job.micro_batch = micro_batch
        if self.task.recomputed is None:
            job.recompute(self._flags([i < recomputed for i in range(len(self._blocks))]))
        return search(job).best

    @property
    def _traced(self) -> PlanTraced:
        """Made once: a model that cannot be traced is not tried again, when an engine is around its blocks."""
        if self._why_not:
            raise fake_trace.Untraceable(self._why_not)
        if self._made is None:
            try:
                self._made = self._trace()
            except fake_trace.Untraceable as error:
                self._why_not = str(error)
                raise
        return self._made

    def _trace(self) -> PlanTraced:
        task = self.task
        if task.selective:
            raise fake_trace.Untraceable("[plan] selective recomputation is not traced")
        with generators.untouched():  # collating draws numbers, and so may the model's own code
            return traced_model.by_fake_tensors(
                self._model,
                self._sample_of(),
                self._loss_of,
                self._blocks,
                task.precision,
                sorted({1, min(4, task.mine), task.mine, task.micro_batch or 1}),
                away=task.away[2] != "none",
                device=task.device,
                inside=Inside() if task.job().for_cpus else None,
            )

    def _flags(self, blocks: Sequence[bool]) -> list[bool]:
        """By link that may be recomputed: a model that is seen as one recomputes all of its blocks."""
        job = self._job(Placement(), self._traced)
        links = len(search(job).best.recomputed)
        return list(blocks) if links == len(blocks) else [any(blocks)] * links

    def _job(self, place: Placement, traced: PlanTraced) -> PlanJob:
        job = self.task.job()
        job.stages = [place.stage]
        job.may_offload([[place.optimizer, *self.task.away]])
        job.trace(type(self._model).__name__, traced)
        return job


def fixed_recomputation(
    policy: Mapping[str, Any] | None, model: nn.Module, blocks: list[tuple[str, nn.Module]]
) -> tuple[tuple[bool, ...] | None, bool]:
    """Task's `recomputed` and `selective` of a configuration's section; None: it is open."""
    if policy is None:
        return None, False
    if policy["policy"] == "none":
        return (False,) * len(blocks), False
    chosen = checkpointing.select(
        model, policy["policy"], policy.get("n", 1), policy.get("units") or None
    )
    ids = {id(module) for module in chosen.values()}
    return tuple(id(module) in ids for _, module in blocks), policy["policy"] == "selective"


def told(forecast: Forecast, place: Placement, note: Callable[[str], None]) -> None:
    """Tells people what is planned, or that a model cannot be traced."""
    try:
        answer = forecast.answer(place)
    except fake_trace.Untraceable as error:
        note(
            f"  plan: nothing can be said before anything is allocated ({error}); micro-batches are "
            "measured instead"
        )
        return
    best = answer.best
    what = "" if answer.fits else f", though more than the {format_bytes(answer.budget)} given"
    note(
        f"  plan, before anything is allocated: micro-batch {best.micro_batch} x accumulation "
        f"{best.accumulation}, {sum(best.recomputed)} blocks recomputed would hold "
        f"{format_bytes(best.peak_bytes)} in the {best.peak_moment}{what}{place.describe(best.ranks)}"
    )


def foretold(forecast: Forecast, place: Placement, chosen: Candidate) -> dict[str, int]:
    """What was said of it before anything was allocated: bytes by account at its peak; empty: nothing."""
    try:
        return dict(forecast.chosen(place, chosen.micro_batch, chosen.recomputed).at_peak)
    except fake_trace.Untraceable:
        return {}  # told() has said so
