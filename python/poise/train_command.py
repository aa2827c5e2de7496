"""`poise train` of a model of Python: the run of src/cli/train.cpp on poise.Engine."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from poise import (
    _C,
    balance,
    banner,
    checkpointing,
    evaluation,
    generators,
    imported,
    misfit,
    model_view,
    placement,
    ranks,
    run_data,
    separable,
    traced_model,
    trainer_balance,
    trainer_data,
)
from poise._batch import repeated
from poise._C import Error, StepResult
from poise.config import keeps_whole, settings_of
from poise.engine import Engine
from poise.forecast import Forecast, fixed_recomputation, foretold, told
from poise.loss import Loss
from poise.misfit import NothingFits
from poise.model_call import ModelCall
from poise.placement import Placement
from poise.planned_loss import scalar
from poise.profiling import Profiling
from poise.run_file import RunFile
from poise.run_report import RunReport
from poise.run_state import RunState
from poise.seeding import seed_everything
from poise.signals import Interrupted, Signals, signals_raised
from poise.update import step


def train(file: RunFile, as_json: bool = False) -> int:
    """Runs the file from beginning to end and returns the exit status.

    An Error, an out-of-memory error and an exception of the model's own code are written into
    metrics.jsonl and go on to the caller.
    """
    if (size := ranks.here().size) > 1:
        raise Error(
            f"[cli] model.import was started on {size} ranks, which this command does not split over; "
            "use poise.Trainer or poise.Engine in a program of your own, or a builtin model"
        )
    settings = settings_of(file.config)
    batch = settings["batch"]
    is_open = batch["micro_batch_size"] == batch["accumulation"] == 0
    is_open = is_open and batch["global_batch_size"] > 0 and settings["memory"]["budget_bytes"] > 0
    batch["micro_batch_size"] = batch["micro_batch_size"] or 1
    accumulation = _accumulation(settings["batch"])
    saves = settings["state"]["save_every"] > 0
    with (
        signals_raised(saves) as signals,
        RunReport(settings, accumulation, as_json) as report,
    ):
        run = _Run(file, settings, accumulation, report, signals, is_open)
        try:
            run.go()
        except Interrupted as interrupted:
            run.save_at_signal(interrupted)
            words = f"ended by signal {interrupted.number}"
            report.note(words)
            report.finish(words, run.held())
            return 128 + interrupted.number
        except BaseException as error:
            report.finish(str(error) or type(error).__name__, run.held())
            raise
        report.finish()
    return 0


class _Run:
    """Everything of one run, made in the order that it needs it."""

    def __init__(
        self,
        file: RunFile,
        settings: dict[str, Any],
        accumulation: int,
        report: RunReport,
        signals: Signals,
        balance_is_open: bool = False,
    ) -> None:
        self._file, self._settings, self._report = file, settings, report
        self._signals = signals
        self._accumulation = accumulation
        self._balance_is_open, self._found = balance_is_open, None
        self._device = ranks.device()
        self._engine: Engine | None = None
        self._halving: trainer_balance.Halving | None = None  # where the split was found
        self._state: RunState | None = None

    def save_at_signal(self, interrupted: Interrupted) -> None:
        if self._state is not None:
            self._state.save_at_signal(interrupted)

    def go(self) -> None:
        self._set_up()
        self._loop()
        self._validate()
        self._state.save_if_best()

    def held(self) -> dict[str, Any] | None:
        """The books, for a run that failed."""
        return self._engine.memory() if self._engine is not None else None

    def _set_up(self) -> None:
        file, settings = self._file, self._settings
        if settings["train"]["sample_bytes"] > 0:
            raise Error(
                f"[cli] train.sample_bytes is {settings['train']['sample_bytes']}, but only a "
                "builtin model writes text; set it to 0"
            )
        seed_everything(settings["engine"]["seed"])
        made = imported.load(file.function, file.arguments, file.path.parent)
        whole = keeps_whole(settings)
        self._model = model_view.moved_to(made.model, self._device) if whole else made.model
        self._data = run_data.of_run(made, settings, self._accumulation, file.given)
        self._call = ModelCall(self._model, shift_labels=self._data.shift_labels)
        if self._balance_is_open:
            self._find_balance(made)
        for line in self._banner():
            self._report.note(line)
        banner.warn_batch_norm(self._model, self._accumulation)
        if self._engine is None:
            self._engine = Engine(self._model, file.config, device=self._device)
        self._model.train()
        state = RunState(settings, self._engine, self._data, self._report)
        state.resume()
        state.rehearse()
        self._state = state

    def _find_balance(self, made: imported.Imported) -> None:
        settings, batch = self._settings, self._settings["batch"]
        if isinstance(made.train_dataset, IterableDataset):
            raise Error(
                "[cli] batch.micro_batch_size is left open, but the train_dataset of model.import is "
                "a stream, which would lose what the planner reads; set it"
            )
        random = generators.Snapshot()  # the run draws as if nothing had been tried
        sample = next(self._data.windows)[0]  # of one sample
        forecast = self._forecast(sample)
        warns = settings["memory"]["on_misfit"] == "warn"
        places = placement.in_order(self._open_placements(), forecast, warns=warns)
        told(forecast, places[0], self._report.note)
        try:
            place = self._measured_balance(sample, places)
        except (NothingFits, torch.OutOfMemoryError) as error:
            raise misfit.explained(error, forecast, places, warns=warns) from error
        random.restore()
        if self._found.may_split:
            self._halving = trainer_balance.Halving(self._engine, self._report.note)
        chosen = self._found.chosen
        foreseen = foretold(forecast, place, chosen)
        self._found = dataclasses.replace(self._found, foretold=foreseen)
        batch["micro_batch_size"], self._accumulation = chosen.micro_batch, chosen.accumulation
        self._engine.set_accumulation(self._accumulation)
        settings["checkpointing"] = self._engine.checkpointing
        self._report.balanced(chosen.accumulation)
        self._data = run_data.of_run(made, settings, self._accumulation, self._file.given)
        budget, where = settings["memory"]["budget_bytes"], place.describe(1)
        for line in trainer_balance.lines(self._found, budget, where):
            self._report.note(line)

    def _measured_balance(self, sample: Any, places: list[Placement]) -> Placement:
        """Makes the engine; anew where nothing fits while states lie as they were planned to."""

        def find_at(place: Placement, *, warns: bool) -> None:
            self._settings["offload"]["optimizer"] = place.optimizer
            with placement.told_as_misfit(ranks=1):
                self._engine = Engine(self._model, self._settings, device=self._device)
            self._model.train()
            self._found = self._balance_of(sample, warns=warns)

        for place in places[:-1]:
            with contextlib.suppress(NothingFits):
                find_at(place, warns=False)
                return place
            if self._engine is not None:
                self._engine.unmake()
                self._engine = None  # nobody asks it for its books
        find_at(places[-1], warns=True)
        return places[-1]

    def _open_placements(self) -> list[Placement]:
        """The optimizer's states lie on the host where nothing fits otherwise, unless the file says."""
        settings = self._settings
        optimizer, where = settings["optimizer"], settings["offload"]["optimizer"]
        is_open = "offload.optimizer" not in self._file.given and where == "none"
        may_leave = optimizer["type"] in placement.OFFLOADED_OPTIMIZERS
        return placement.choices([0], ["none", "host"] if is_open and may_leave else [where])

    def _forecast(self, sample: Any) -> Forecast:
        settings = self._settings
        optimizer, offload = settings["optimizer"], settings["offload"]
        samples, policy = settings["batch"]["global_batch_size"], settings["checkpointing"]
        blocks = model_view.find_units(self._model)
        task = placement.Task(
            1,
            self._device,
            optimizer["type"],
            optimizer["momentum"],
            optimizer["moments"],
            traced_model.precision_of(settings["precision"]),
            samples,
            settings["memory"]["budget_bytes"],
            trainer_balance.largest_usual(samples),
            0,
            (offload["gradients"], offload["parameters"], offload["activations"]),
            *fixed_recomputation(
                policy if policy["policy"] != "none" else None, self._model, blocks
            ),
        )

        def may_split() -> bool:
            reason = separable.why_not_split(
                self._model, None, own_loss=True, came_counted=lambda: self._call.came_counted
            )
            return reason is None

        def loss_of(batch: Any) -> torch.Tensor:
            return scalar(self._loss(batch))

        return Forecast(task, self._model, blocks, lambda: sample, loss_of, may_split)

    def _balance_of(self, sample: Any, *, warns: bool) -> balance.Balance:
        """Where nothing fits and memory.on_misfit is warn, the smallest there is, if `warns`."""
        settings = self._settings

        samples = settings["batch"]["global_batch_size"]
        sizes = trainer_balance.micro_batches(
            self._engine, None, self._call, lambda: sample, self._loss, samples
        )
        try:
            found = balance.find(
                self._engine,
                lambda size: repeated(sample, size),
                self._loss,
                samples=samples,
                budget=settings["memory"]["budget_bytes"],
                micro_batches=sizes,
            )
        except NothingFits as error:
            if settings["memory"]["on_misfit"] == "refuse" or not warns:
                raise
            return balance.smallest(self._engine, error, may_split=sizes is None)
        return dataclasses.replace(found, may_split=sizes is None)

    def _loop(self) -> None:
        train = self._settings["train"]
        folder, every = Path(train["output_dir"]), train["validate_every"]
        trace = Profiling(train["profile_updates"], folder, name="trace.json")
        try:
            if self._state.owes_validation:
                self._validate()
            for number in range(self._report.updates + 1, train["max_updates"] + 1):
                trace.before(number)
                begin = time.perf_counter()
                self._state.open_window()
                self._data.windows.set_accumulation(self._engine.accumulation)
                result = self._update(next(self._data.windows), first=number == 1)
                self._state.close_window()
                self._report.update(result, time.perf_counter() - begin)
                if number == 1 and self._found is not None:
                    self._report.compared(self._found, result)
                if trace.after(number):
                    self._report.note(f"  trace written to {trace.path}")
                if every > 0 and number % every == 0 and number < train["max_updates"]:
                    self._validate()
                self._state.save_if_due()
                self._signals.check()
            self._state.save_at_end()
        finally:
            trace.close()

    def _update(self, window: list[Any], *, first: bool) -> StepResult:
        def run(pieces: list[Any]) -> StepResult:
            return step(self._engine, pieces, self._loss, first, self._report.note)

        return run(window) if self._halving is None else self._halving(window, run)

    def _loss(self, batch: Any) -> Loss:
        self._signals.check()
        return self._call(trainer_data.to_device(batch, self._device))

    def _validate(self) -> None:
        if self._data.validation is None:
            return
        batches, scope = self._data.validation(), self._engine.forward_scope
        self._state.begin_validation()
        with generators.untouched():
            metrics = evaluation.evaluate(self._model, batches, self._loss, scope)
        self._report.validation(metrics["eval_loss"])
        self._state.validated(metrics["eval_loss"])

    def _banner(self) -> list[str]:
        settings, data = self._settings, self._data
        micro, updates = settings["batch"]["micro_batch_size"], settings["train"]["max_updates"]
        samples = micro * self._accumulation
        tokens = f", {data.update_tokens:,} tokens an update" if data.update_tokens else ""
        epochs = f" are {updates * samples / data.samples:.2f} epochs" if data.samples else ""
        optimizer, schedule = settings["optimizer"], settings["schedule"]
        budget = settings["memory"]["budget_bytes"]
        return [
            f"poise trains {self._file.function} on {self._device}",
            f"  micro-batch {micro} x accumulation {self._accumulation} x ranks 1 "
            f"= global batch {samples}{tokens}",
            f"  {data.description}; {updates:,} updates{epochs}",
            f"  {banner.parameters(self._model)}; {banner.precision(settings['precision'])}",
            f"  {optimizer['type']}, learning rate {optimizer['lr']:g}, {schedule['type']}, "
            f"warmup {schedule['warmup_updates']}",
            f"  recomputed blocks: {self._recomputed()}; memory budget: "
            f"{_C.format_bytes(budget) if budget else 'none'}",
            *banner.offloading(settings["offload"]),
        ]

    def _recomputed(self) -> str:
        policy = self._settings["checkpointing"]
        blocks = [name for name, _ in model_view.find_units(self._model)]
        count = 0
        if policy["policy"] != "none":
            units = policy["units"] or blocks or None
            count = len(checkpointing.select(self._model, policy["policy"], policy["n"], units))
        return f"{count} of {len(blocks)} ({policy['policy']})"


def _accumulation(batch: dict[str, Any]) -> int:
    """As config::accumulation() of the core, which has checked that it divides."""
    if batch["global_batch_size"] == 0:
        return max(1, batch["accumulation"])
    return batch["global_batch_size"] // batch["micro_batch_size"]
