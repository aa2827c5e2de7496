"""Where states lie: the stage of ZeRO and the optimizer's place, as far as a run's settings leave them open.

What they take on each rank follows from the parameters alone; how fast they are is planned from a trace
of the model without memory, before anything is allocated. What lies on the host is slower to update and
outside of the budget, so it comes after all else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from poise import fake_trace, misfit, traced_model, utilization
from poise._C import PlanJob, format_bytes
from poise._C import plan_search as search
from poise.misfit import NothingFits

if TYPE_CHECKING:
    from poise.forecast import Forecast

logger = logging.getLogger("poise")

# Those whose update needs sums over whole parameters stay on the device.
OFFLOADED_OPTIMIZERS = ("adamw", "adam", "lion", "sgd")
SURE_SHARE = 0.95  # of the budget: what operations take inside is not traced
UNKNOWN_GPU = "A100-80GB"  # its rates order placements on a GPU that is not in the table


@dataclasses.dataclass(frozen=True)
class Placement:
    """A way to lay states out.

    Attributes:
      stage, keep_gathered: of ZeRO.
      optimizer: where masters and moments lie: none (the device), host, file.
    """

    stage: int = 0
    keep_gathered: bool = False
    optimizer: str = "none"

    def describe(self, ranks: int) -> str:
        """ "; stage 2, optimizer states on the host"; empty where there is nothing to say."""
        parts = [f"stage {self.stage}"] if ranks > 1 else []
        parts += ["parameters kept for the window"] if self.keep_gathered else []
        parts += ["optimizer states on the host"] if self.optimizer == "host" else []
        return f"; {', '.join(parts)}" if parts else ""


def of(args: Any) -> Placement:
    """That of a Trainer's arguments."""
    return Placement(args.zero_stage, args.zero_keep_gathered, args.offload_optimizer)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a run is, for a plan of it.

    Attributes:
      ranks, device: that it trains on.
      optimizer, momentum, moments: as in the configuration.
      precision: a name of traced_model.PRECISIONS.
      global_batch: samples of an update on all ranks.
      budget: bytes of each rank.
      micro_batch: that stays where the loss may not be split.
      shard_ranks: of a group that shards; 0: all.
      away: where gradients, parameters and activations lie: none, host, file.
      recomputed: which blocks recompute their activations, where that is given.
      selective: and keep some.
    """

    ranks: int
    device: torch.device
    optimizer: str
    momentum: float
    moments: str
    precision: str
    global_batch: int
    budget: int
    micro_batch: int = 0
    shard_ranks: int = 0
    away: tuple[str, str, str] = ("none", "none", "none")
    recomputed: tuple[bool, ...] | None = None
    selective: bool = False

    @property
    def mine(self) -> int:
        """Samples of an update on each rank."""
        return max(1, self.global_batch // self.ranks)

    def job(self) -> PlanJob:
        job = PlanJob()
        job.run_on(f"{self.ranks}x{_device_name(self.device)}", _per_node(self.ranks))
        job.compute_in(*traced_model.PRECISIONS[self.precision])
        job.optimize_with(self.optimizer, self.momentum, self.moments)
        job.global_batch, job.budget = self.global_batch, self.budget
        job.sequence = 1
        job.shard_ranks = [self.shard_ranks or self.ranks]
        job.run_on_this_cpu()
        return job


def choices(stages: Sequence[int], optimizers: Sequence[str]) -> list[Placement]:
    """All combinations, in the order they are wanted in where nothing is known of their time."""
    return [
        Placement(stage, False, place) for place, stage in itertools.product(optimizers, stages)
    ]


def in_order(
    found: Sequence[Placement], forecast: Forecast, *, warns: bool = False
) -> list[Placement]:
    """Those that may fit, the most promising first: the fastest plan that fits, what needs least at last.

    Args:
      found: to choose from, in the order they are wanted in where their time is not known.
      forecast: of the run.
      warns: where states alone take more than the budget, whatever the placement, that is said, and
        the one that holds least remains.

    Raises:
      NothingFits: then, unless it warns.
    """
    budget = forecast.task.budget
    possible = [place for place in found if forecast.held(place) < budget]
    if not possible:
        least = min(found, key=forecast.held)
        error = NothingFits(_states_text(forecast, least), None, dominated_by="what is held always")
        error = misfit.explained(error, forecast, [least], warns=warns)
        if not warns:
            raise error
        logger.warning("%s; it begins all the same, since on_misfit is warn", error)
        return [least]
    if len({place.stage for place in possible}) == 1:
        return possible
    try:
        return _planned(possible, forecast)
    except fake_trace.Untraceable as error:
        logger.warning("%s; the lowest stage that holds the states is tried first", error)
        return possible


@contextlib.contextmanager
def told_as_misfit(ranks: int) -> Iterator[None]:
    """Around what makes an engine with states in a place: where memory runs out, nothing fits there, and
    another place may be tried. Of several ranks it has ended the group, and stands."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if ranks > 1:
            raise
        why = str(error).splitlines()[0]
        raise NothingFits(
            f"[plan] the engine itself ran out of memory while it was made: {why}", None
        ) from error


def _states_text(forecast: Forecast, least: Placement) -> str:
    task = forecast.task
    return (
        f"[plan] what is held between micro-batches takes {format_bytes(forecast.held(least))} at the "
        f"least, of {format_bytes(task.budget)} that were given: with every stage that {task.ranks} "
        f"rank{'s' if task.ranks > 1 else ''} may have and, where it may leave, the optimizer's state "
        "away from the device"
    )


def _planned(found: Sequence[Placement], forecast: Forecast) -> list[Placement]:
    sure = int(SURE_SHARE * forecast.task.budget)
    plans = []
    for number, place in enumerate(found):
        job = forecast.job(place)
        job.budget = sure
        answer, tries = search(job), _tries(job, forecast.task.mine)
        kept = dataclasses.replace(place, keep_gathered=answer.best.keep_gathered)
        # Code around a Trainer that touches parameters would meet shards: stage 3 comes after the others.
        order = (
            not answer.fits,
            tries > sure,
            place.optimizer != "none",
            place.stage == 3,
            answer.best.seconds["update"] if answer.fits else answer.floor,
            number,
        )
        plans.append((order, kept))
    return [place for _, place in sorted(plans, key=lambda plan: plan[0])]


def _tries(job: PlanJob, mine: int) -> int:
    """What a balance holds that looks for the split: it tries the second smallest micro-batch with
    everything kept, and on several ranks none of these trials may run out of memory."""
    if job.micro_batch == 0:
        job.micro_batch = next((n for n in range(2, mine + 1) if mine % n == 0), 1)
    return int(search(job).front[0].peak_bytes)


def _device_name(device: torch.device) -> str:
    """The known device that this one is, or stands for it."""
    if device.type != "cuda":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    known = utilization.known_device(properties.name, properties.total_memory)
    return UNKNOWN_GPU if known is None else str(known["name"])


def _per_node(ranks: int) -> int:
    there = torch.cuda.device_count() if torch.cuda.is_available() else ranks
    return max(1, min(ranks, there))
