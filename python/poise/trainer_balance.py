"""A Trainer's balance: found before the first update, corrected where memory runs out after all."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from poise import (
    balance,
    generators,
    ranks,
    separable,
    trace,
    trainer_data,
)
from poise._batch import leaves_of, of_entries, samples_in
from poise._C import Error, StepResult, format_bytes, parse_bytes
from poise.engine import Engine
from poise.kept_attributes import Counted
from poise.loss import Loss
from poise.model_call import ModelCall
from poise.training_arguments import TrainingArguments

logger = logging.getLogger("poise")

LOOKED_AT = 256  # samples among which the longest is taken
USUAL_MICRO_BATCH = 8  # of TrainingArguments, kept where the loss may not be split otherwise


def find(
    engine: Engine,
    args: TrainingArguments,
    dataset: Any,
    collate: Callable | None,
    call: ModelCall,
    loss_fn: Callable[[Any], Loss],
    *,
    warns: bool = True,
    own_loss: bool = True,
) -> balance.Balance:
    """What the arguments leave open, for this model and data; all ranks.

    `own_loss`: what `call` makes is the loss; else other code makes one of it. Reading samples and
    collating them may draw random numbers: the run draws what it would without.
    Where nothing fits and args.on_misfit is warn, the smallest there is, unless `warns` is off.
    """
    check_data(dataset, args)
    random = generators.Snapshot()
    try:
        return _find(engine, args, dataset, collate, call, loss_fn, warns, own_loss)
    finally:
        random.restore()


def _find(
    engine: Engine,
    args: TrainingArguments,
    dataset: Any,
    collate: Callable | None,
    call: ModelCall,
    loss_fn: Callable[[Any], Loss],
    warns: bool,
    own_loss: bool,
) -> balance.Balance:
    sample = longest(dataset, args, collate)
    samples = args.global_batch_size // args.world_size
    engine.model.train()

    def batch_of(size: int) -> Any:
        return (collate or default_collate)([sample] * size)

    sizes = micro_batches(
        engine,
        args.separable_loss,
        call,
        lambda: batch_of(1),
        loss_fn,
        samples,
        own_loss=own_loss,
    )
    try:
        found = balance.find(
            engine,
            batch_of,
            loss_fn,
            samples=samples,
            budget=_bytes(args.memory_budget),
            micro_batches=sizes,
            recompute=args.recompute_is_open,
        )
        return dataclasses.replace(found, may_split=sizes is None)
    except balance.NothingFits as error:
        if args.on_misfit == "refuse" or not warns:
            raise
        return balance.smallest(engine, error, may_split=sizes is None)


def largest_usual(samples: int) -> int:
    """The micro-batch of so many samples where it may not be chosen."""
    return max(n for n in range(1, USUAL_MICRO_BATCH + 1) if samples % n == 0)


def micro_batches(
    engine: Engine,
    is_separable: bool | None,
    call: ModelCall,
    sample_of: Callable[[], Any],
    loss_fn: Callable[[Any], Loss],
    samples: int,
    *,
    own_loss: bool = True,
) -> list[int] | None:
    """The micro-batches that may be chosen; None: all.

    Args:
      engine: of the run.
      is_separable: what was said of the loss; None: nothing.
      call: makes the losses.
      sample_of: makes a batch of one sample, of which `loss_fn` gives the loss.
      samples: of one update on this rank.
      own_loss: what `call` makes is the loss.
    """
    if _may_split(engine, is_separable, call, sample_of, loss_fn, own_loss):
        return None
    return [largest_usual(samples)]


def check_data(dataset: Any, args: TrainingArguments) -> None:
    """Raises Error where the data comes in batches of its own, or the split decides what is dropped."""
    if isinstance(dataset, (DataLoader, IterableDataset)):
        raise Error(
            f"[trainer] memory_budget and global_batch_size leave the micro-batch open, but "
            f"train_dataset is {type(dataset).__name__}, which cannot be split anew; give "
            "per_device_train_batch_size (a DataLoader's batch size), or a dataset with a length"
        )
    if args.dataloader_drop_last:
        raise Error(
            "[trainer] dataloader_drop_last with an open micro-batch: what is dropped would depend "
            "on the split; give per_device_train_batch_size, or leave dataloader_drop_last out"
        )


def lines(found: balance.Balance, budget: int | str, where: str = "") -> list[str]:
    """For people, before the first update; `where`: states lie (Placement.describe)."""
    best = found.chosen
    if not found.fits:
        return [
            f"  plan: nothing fits {format_bytes(_bytes(budget))}; it begins with what takes least: "
            f"micro-batch {best.micro_batch} x accumulation {best.accumulation}, {best.recomputed} "
            f"blocks recomputed{where}"
        ]
    text = [
        f"  plan: {found.candidates} candidates; the fastest that fits "
        f"{format_bytes(_bytes(budget))} holds {format_bytes(best.peak)}: micro-batch "
        f"{best.micro_batch} x accumulation {best.accumulation}, {best.recomputed} blocks recomputed, "
        f"about {best.seconds:.3g} s of forward and backward an update{where}"
    ]
    for other in found.front:
        if other.peak < best.peak:
            text.append(
                f"  with less memory: {format_bytes(other.peak)} takes micro-batch "
                f"{other.micro_batch}, {other.recomputed} recomputed, {other.seconds:.3g} s"
            )
            break
    return text


def compared(found: balance.Balance, result: StepResult) -> list[str]:
    """Predicted and measured, after the first update."""
    predicted, measured = found.chosen.peak, result.peak_bytes
    if not found.accounts or measured == 0:
        return []
    accounts = [
        f"{name} {format_bytes(found.accounts.get(name, 0))} / {format_bytes(count)}"
        for name, count in result.accounts.items()
        if count or found.accounts.get(name)
    ]
    return [
        f"  plan: peak {format_bytes(predicted)} predicted, {format_bytes(measured)} measured "
        f"({measured / predicted - 1:+.1%}){_foretold(found, measured)}",
        f"        {', '.join(accounts)}",
        *_seconds_compared(found.chosen.seconds, result.forward_seconds + result.backward_seconds),
    ]


def _foretold(found: balance.Balance, measured: int) -> str:
    said = sum(found.foretold.values())
    if said == 0:
        return ""
    return f"; {format_bytes(said)} before anything was allocated ({measured / said - 1:+.1%})"


def metrics(found: balance.Balance, result: StepResult) -> dict[str, Any]:
    """The same for metrics.jsonl: bytes by account at the peak (foretold: before anything was allocated),
    and seconds of forward and backward."""
    if not found.accounts or result.peak_bytes == 0:
        return {}
    foretold = {"foretold": found.foretold} if found.foretold else {}
    return {
        **foretold,
        "predicted": found.accounts,
        "measured": result.accounts,
        "predicted_seconds": found.chosen.seconds,
        "measured_seconds": result.forward_seconds + result.backward_seconds,
    }


def _seconds_compared(predicted: float, measured: float) -> list[str]:
    if predicted <= 0 or measured <= 0:
        return []
    return [
        f"        forward and backward {predicted:.3g} s predicted, {measured:.3g} s measured "
        f"({measured / predicted - 1:+.0%}; a first update warms up)"
    ]


class Halving:
    """Runs a window again in halved micro-batches where one ran out of memory, and stays with them.

    No sample is lost or seen twice: the window's gradients were dropped, and its random state and
    buffers are put back. Ranks drop and halve a window together, whichever ran out. Where no rank has
    more than a single sample in a micro-batch the error stands.
    """

    def __init__(self, engine: Engine, note: Callable[[str], None], parts: int = 1) -> None:
        self._engine, self._note = engine, note
        self.parts = parts  # of every micro-batch

    def __call__(
        self, window: list[Any], run: Callable[[list[Any]], StepResult | None]
    ) -> StepResult | None:
        while True:
            pieces = [piece for batch in window for piece in split(batch, self.parts)]
            largest = max(map(samples_in, pieces))
            counted, state = Counted(self._engine.model), _random_state()
            try:
                return run(pieces)
            except torch.OutOfMemoryError as error:
                # The engine's step raises it on all ranks or on none.
                if not any(ranks.any_of(self._engine.group, [largest > 1])):
                    raise
                message = str(error).splitlines()[0]
            del pieces
            _restore(state)
            counted.put_back()
            self.parts *= 2
            self._note(
                f"  out of memory with micro-batches of {largest} samples; the window runs again in "
                f"halves of them ({message})"
            )


def split(batch: Any, parts: int) -> Iterator[Any]:
    """The batch in so many parts, or fewer: what has a row per sample is split (a list with an entry for each
    too), the rest repeated."""
    rows = samples_in(batch)
    size = max(1, -(-rows // parts))
    if parts == 1 or rows < 2:
        yield batch
        return
    for first in range(0, rows, size):
        yield _part(batch, rows, slice(first, first + size), is_batch=True)


def _part(value: Any, rows: int, part: slice, *, is_batch: bool = False) -> Any:
    if isinstance(value, torch.Tensor):
        return value[part] if _has_rows(value, rows) else value
    if isinstance(value, list) and not is_batch and len(value) == rows:
        # Texts, targets of images; tensors with rows of their own each are another structure.
        if not all(_has_rows(one, rows) for one in value):
            return value[part]
    if isinstance(value, (list, tuple, Mapping)):
        return of_entries(lambda one: _part(one, rows, part), value)
    return value


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def _random_state() -> Any:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), gpu


def _restore(state: Any) -> None:
    cpu, gpu = state
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
        torch.cuda.empty_cache()


def _may_split(
    engine: Engine,
    is_separable: bool | None,
    call: ModelCall,
    sample_of: Callable[[], Any],
    loss_fn: Callable[[Any], Loss],
    own_loss: bool,
) -> bool:
    """Whether another micro-batch is the same training; says so where it is not known."""
    reason = separable.why_not_split(
        engine.model,
        is_separable,
        own_loss=own_loss and call.models_loss,
        came_counted=lambda: _says_count(engine, call, sample_of(), loss_fn),
    )
    if reason is not None and is_separable is None:
        logger.warning(
            "[trainer] %s: the micro-batch stays at most %d and only recomputation is chosen; "
            "separable_loss=True of the Trainer says that the loss may be split, False that it may not",
            reason,
            USUAL_MICRO_BATCH,
        )
    return reason is None


def _says_count(
    engine: Engine, call: ModelCall, sample: Any, loss_fn: Callable[[Any], Loss]
) -> bool:
    """By a trial, since memory that runs out on one rank ends one on all of them."""
    try:
        trace.measure(engine, sample, loss_fn)
    except torch.OutOfMemoryError:
        return True  # the search will say what is missing
    return call.came_counted


def longest(dataset: Any, args: TrainingArguments, collate: Callable | None) -> Any:
    """The sample with most elements among the first ones."""
    count = trainer_data.examples(dataset) or 0
    if count == 0:
        raise Error("[trainer] train_dataset is empty; give at least one sample")

    def size(sample: Any) -> int:
        try:
            leaves = leaves_of(sample)
        except (TypeError, ValueError):
            return 0
        return sum(v.numel() if isinstance(v, torch.Tensor) else 1 for v in leaves)

    return max((dataset[i] for i in range(min(count, LOOKED_AT))), key=size)


def _bytes(budget: int | str) -> int:
    return parse_bytes(budget) if isinstance(budget, str) else budget
