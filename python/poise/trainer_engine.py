"""How a Trainer comes to its engine: made for the run, taken over from the last one, or made to find a balance."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import torch

from poise import (
    banner,
    kept_attributes,
    misfit,
    placement,
    torch_optimizer,
    trainer_balance,
    trainer_forecast,
)
from poise.balance import Balance
from poise.deepspeed import of_trainer
from poise.engine import Engine
from poise.forecast import Forecast, foretold, told
from poise.loss import Loss
from poise.misfit import NothingFits
from poise.placement import Placement
from poise.schedule_arguments import is_theirs
from poise.trainer_evaluation import TrainerEvaluation
from poise.trainer_optimizer import TorchOptimizer
from poise.two_part_loss import whole

# What a subclass may make an optimizer or a scheduler of torch in.
MAKES_OPTIMIZER = ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler")


class TrainerEngine(TrainerEvaluation):
    """Base of poise.Trainer, which makes what these methods use."""

    def _goes_on(self, updates: int) -> bool:
        """Whether a run of so many updates trains on with the last one's engine."""
        if self.engine is None or not self._ended or self._model_init is not None:
            return False
        same = self._made_from == _without_schedule(self.args.to_config(updates))
        new = [p for p in self.model.parameters() if p.requires_grad and not self.engine.trains(p)]
        return same and self.engine.model is self.model and not new

    def _make_engine(self, updates: int) -> None:
        """Or takes the last run's, where train() left it."""
        config = self.args.to_config(updates)
        self._torch = self._torch_optimizer(updates)
        if self._torch is None:
            self._take_engine(config)
            return
        config, is_new = self._torch.settings(config), self.engine is None
        with torch_optimizer.left_out_frozen(self.model, self.optimizer):
            self._take_engine(config)
            try:
                self._torch.attach(self.engine)
            except BaseException:
                if is_new:
                    self.engine.unmake()
                    self.engine = None
                raise

    def _take_engine(self, config: dict[str, Any]) -> None:
        if self.engine is None:
            before = banner.types(self.model)
            self.engine = Engine(self.model, config, self._units, self._group, device=self._device)
            self._note_types(before)
            self._made_from = _without_schedule(self.args.to_config(0))
        else:
            self.engine.set_schedule(config, self.engine.updates)

    def _makes_no_torch_optimizer(self) -> bool:
        theirs = self._given_optimizers != (None, None) or self.args.deepspeed is not None
        theirs = theirs or is_theirs(self.args)
        return not theirs and not any(self._overrides(name) for name in MAKES_OPTIMIZER)

    def _torch_optimizer(self, updates: int) -> TorchOptimizer | None:
        """Where somebody gave or makes an optimizer or a scheduler of torch."""
        given, self.lr_scheduler = self._given_optimizers
        self.optimizer = given if self.engine is None else self.optimizer
        if not any(self._overrides(name) for name in MAKES_OPTIMIZER):
            if self.optimizer is None:
                self.optimizer = of_trainer.optimizer(self.model, self.args)
            if self.lr_scheduler is None and of_trainer.has_scheduler(self.args):
                optimizer = self.create_optimizer()
                self.lr_scheduler = of_trainer.scheduler(optimizer, self.args, updates)
            if self.optimizer is None and self.lr_scheduler is None and not is_theirs(self.args):
                return None  # the engine's own
        self.create_optimizer_and_scheduler(updates)
        return TorchOptimizer(self.optimizer, self.lr_scheduler)

    def _find_balance(self, updates: int) -> Balance:
        """Makes the engine; anew where nothing fits while states lie as they were planned to."""
        known = self._makes_no_torch_optimizer()  # what its optimizer holds
        forecast = self._forecast() if known else None
        places = [placement.of(self.args)]
        if forecast is not None and self.engine is None:
            places = trainer_forecast.placements(self.args, self.model, forecast)
            told(forecast, places[0], self._say)
        try:
            found = self._measured_balance(places, updates)
        except (NothingFits, torch.OutOfMemoryError) as error:
            warns = self.args.on_misfit == "warn"
            raise misfit.explained(error, forecast, places, warns=warns) from error
        if forecast is None:
            return found
        chosen = foretold(forecast, placement.of(self.args), found.chosen)
        return dataclasses.replace(found, foretold=chosen)

    def _measured_balance(self, places: list[Placement], updates: int) -> Balance:
        given = self.args
        try:
            found = self._first_that_fits(places, updates)
        except BaseException:
            self.args = given  # another train() finds its balance anew
            raise
        self.args = self.args.with_balance(
            found.chosen.micro_batch, self.engine.checkpointing, may_halve=found.may_split
        )
        self._made_from = _without_schedule(self.args.to_config(0))
        return found

    def _first_that_fits(self, places: list[Placement], updates: int) -> Balance:
        given = self.args

        def found_at(place: Placement, *, warns: bool) -> Balance:
            self.args = given.placed(place)
            with placement.told_as_misfit(self._group.size):
                self._make_engine(updates)
            return trainer_balance.find(
                self.engine,
                self.args,
                self.train_dataset,
                self._collate(),
                self._call,
                self._whole_loss,
                warns=warns,
                own_loss=not self._overrides("compute_loss"),
            )

        for place in places[:-1]:
            with contextlib.suppress(NothingFits):
                return found_at(place, warns=False)
            if self.engine is not None:
                self.engine.unmake()
                self.engine = None
        return found_at(places[-1], warns=True)

    def _forecast(self) -> Forecast:
        own = not self._overrides("compute_loss")
        data, collate = self.train_dataset, self._collate()
        return trainer_forecast.forecast_of(
            self.args,
            self.model,
            self._units,
            data,
            collate,
            self._call,
            self._foretold_loss,
            own_loss=own,
        )

    def _foretold_loss(self, batch: Any) -> Loss:
        """Of tensors without memory, which a subclass's compute_loss must not keep among its figures."""
        with kept_attributes.kept(self):
            return self._loss_of(batch)

    def _whole_loss(self, batch: Any) -> Loss:
        loss = self._loss(batch)
        return whole(loss) if loss.terms else loss

    def _note_types(self, before: set[torch.dtype]) -> None:
        """Says it where the engine keeps parameters in another type than the model came in."""
        if line := banner.changed_types(before, banner.types(self.model)):
            self._say(line)

    def _say(self, line: str) -> None:
        """Where there is no log yet."""
        if not self.args.is_quiet and self._group.rank == 0:
            print(line, file=sys.stderr)


def _without_schedule(config: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in config.items() if name != "schedule"}
