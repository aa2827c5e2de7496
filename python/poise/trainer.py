"""poise.Trainer: a whole run from a model, arguments and datasets."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from poise import (
    automatic_budget,
    banner,
    callbacks,
    columns,
    engine_view,
    generators,
    hand_update,
    meta,
    model_choice,
    model_view,
    placement,
    process_settings,
    ranks,
    report_to,
    trackers,
    trainer_balance,
    trainer_data,
    unused_overrides,
    utilization,
    wrong_batch,
)
from poise._C import Error, StepResult, WindowDropped
from poise.accelerator_view import AcceleratorView
from poise.balance import Balance
from poise.best_model import BestModel
from poise.callbacks import TrainerControl, TrainerState
from poise.chunked_head import ChunkedHead
from poise.config import settings_of
from poise.data import WindowIterator
from poise.engine import Engine
from poise.label_smoothing import LabelSmoothing
from poise.loss import Loss
from poise.metrics_log import MetricsLog, NoMetrics
from poise.model_call import ModelCall
from poise.own_step import OwnStep
from poise.prediction import EvalPrediction
from poise.profiling import Profiling
from poise.progress import Progress
from poise.run_length import RunLength
from poise.run_log import RunLog
from poise.schedule_arguments import updates_of
from poise.seeding import seed_everything
from poise.signals import Signals, saves_noted
from poise.trainer_engine import TrainerEngine
from poise.trainer_optimizer import TorchOptimizer
from poise.trainer_saving import TrainerSaves
from poise.training_arguments import TrainingArguments
from poise.update import step


class TrainOutput(NamedTuple):
    """What a run comes to: updates, mean loss over them, metrics by name."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer(TrainerEngine):
    """Trains a model; names as in transformers' Trainer, whose scripts and subclasses it takes.

    Where torchrun, Slurm or mpirun started several ranks, all of them make the same Trainer and the
    same calls; each gets its share of the data, the first one writes and shows. All have rank 0's
    parameters, and the same results of evaluate() and predict().

    Args:
      model: returns the loss from forward (a scalar, a tuple that begins with it, an output with
        .loss), or anything that compute_loss_func makes a loss of.
      args: poise.TrainingArguments, or transformers' own (docs/training_arguments.md); None: all
        defaults.
      data_collator: makes a batch of a list of samples; None: processing_class pads, or numbers are
        stacked.
      train_dataset: a dataset, or a DataLoader.
      eval_dataset: the same for evaluate().
      model_init: makes the model instead, anew for every train().
      compute_loss_func: (outputs, labels) -> a mean, (mean, n) or poise.Loss.
      compute_metrics: poise.prediction.EvalPrediction -> a dictionary of numbers, for evaluate() and
        predict().
      preprocess_logits_for_metrics: (predictions, labels) of a batch -> what is kept of it for
        compute_metrics and predict(), for example the class instead of all logits.
      callbacks: objects with methods of poise.callbacks.TrainerCallback, transformers' too, or
        classes of them; a thing with log(dict, step=), as wandb's run, gets every line. One may freeze
        what is trained, and free it again, by requires_grad, as for poise.Engine.
      processing_class: a tokenizer or processor, which pads batches; tokenizer is its old name.
      optimizers: (optimizer, scheduler) of torch: AdamW, Adam or SGD, one of poise.optimizers, or
        transformers' Adafactor, whose work the engine does, and
        what steps with its updates. (None, None): as args say.
      units: as in poise.Engine.
      shift_labels: as in poise.model_call.ModelCall.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], Any] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        units: model_view.UnitChoice = None,
        shift_labels: bool | None = None,
    ) -> None:
        unused_overrides.refuse(self)
        self.args = TrainingArguments.of(args)
        self.processing_class = processing_class if processing_class is not None else tokenizer
        self.optimizer, self.lr_scheduler = optimizers
        self._given_optimizers = tuple(optimizers)
        self._device = self.args.device
        self._group = ranks.join(self._device, self.args.ddp_backend, self.args.ddp_timeout)
        process_settings.apply(self.args.full_determinism, self.args.tf32, self._device)
        self.args = automatic_budget.settled(self.args, self._group)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.callbacks = report_to.listeners(self.args)
        self.callbacks += [trackers.listener(one) for one in callbacks or []]
        self.state, self.control = TrainerState(), TrainerControl()
        self._run_log: RunLog | None = None  # of the run that is going on
        self._torch: TorchOptimizer | None = None
        self._best: BestModel | None = None  # of the last train()
        self.engine: Engine | None = None  # of the last train()
        self._ended = False  # it came to its end
        self._model_init, self._units = model_init, units
        self._compute_loss_func, self._shift_labels = compute_loss_func, shift_labels
        self._found: Balance | None = None  # where the arguments left it open
        self._halving: trainer_balance.Halving | None = None
        self._step = OwnStep(type(self).__name__)
        self._check_eval_dataset()
        self._take(model_choice.first(model, model_init, self.args.seed))
        self.data_collator = data_collator or columns.usual_for(self.model, self.processing_class)
        self.accelerator = AcceleratorView(self._group, self._device, self._step)
        self._event("on_init_end")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Trains from the model's present values (model_init's, if given) to the end of the run.

        A second call goes on with the optimizer's moments and the loss scale and begins counters and
        schedule anew, as in transformers; after an error, or with another model, everything is new.

        resume_from_checkpoint (of the arguments, too): the path of a checkpoint, or True for the latest
        one in output_dir; the run goes on from it. SIGTERM and SIGUSR1, on any rank, end it between two
        micro-batches with poise.signals.Interrupted: the open window is dropped, and a checkpoint made
        after the last whole update; a resumed run is the unbroken one.

        Ctrl-C ends it between two micro-batches: the open window is dropped, files are closed, and
        KeyboardInterrupt goes on to the caller. A non-finite loss or gradient stops it with the
        first parameter, input or module that is not finite, unless on_nonfinite says skip.
        """
        unused_overrides.refuse(self)
        saves = self.args.save_strategy != "no"
        args, folder, first = self.args, Path(self.args.output_dir), self._group.rank == 0
        data = self._train_data()
        if args.balance_is_open:
            trainer_balance.check_data(data, args)
        windows = trainer_data.train_windows(data, args, self._collate())
        run = RunLength.of(
            trainer_data.batches_per_epoch(data, args), args, trainer_data.splits_over(data, args)
        )
        goes_on = self._goes_on(run.updates)
        if self.engine is not None and not goes_on:  # the memory of an earlier run goes first
            self.engine.give_back()
            self.engine = None
        self._ended = False
        if self._model_init is not None:
            self._take(model_choice.made(self._model_init, args.seed))
        seed_everything(args.seed + self._group.rank)  # dropout differs from rank to rank
        with contextlib.ExitStack() as stack:
            stack.enter_context(ranks.told_to_others(self._group))
            stack.enter_context(wrong_batch.asserts_explained())
            stack.enter_context(ranks.only_first_logs(self._group))
            stack.enter_context(model_choice.without_cache(self.model))
            found = self._find_balance(run.updates) if args.balance_is_open else None
            if found is None:
                self._make_engine(run.updates)
            else:
                args = self.args
                windows = trainer_data.train_windows(data, args, self._collate())
            stack.enter_context(contextlib.closing(windows))
            metrics = stack.enter_context(
                MetricsLog(folder / "metrics.jsonl") if first else NoMetrics()
            )
            self._show_banner(run, data)
            bar = stack.enter_context(Progress(run.updates, args.disable_tqdm if first else True))
            banner.warn_batch_norm(self.model, args.accumulation, self._group.size)
            details = self._details(train_dataloader=data)
            log = RunLog(
                args,
                run,
                metrics,
                bar,
                self.callbacks,
                self._group,
                details,
                self.log,
                **self._use(),
            )
            self.state, self.control, self._run_log = log.state, log.control, log
            stack.callback(setattr, self, "_run_log", None)
            self._found = found
            parts = self._halving.parts if goes_on and self._halving is not None else 1
            self._halving = (
                trainer_balance.Halving(self.engine, log.note, parts)
                if self.args.found_may_halve
                else None
            )
            where = placement.of(args).describe(self._group.size)
            for line in trainer_balance.lines(found, args.memory_budget, where) if found else ():
                log.note(line)
            profiling = stack.enter_context(
                contextlib.closing(Profiling(args.profile_steps if first else None, folder))
            )
            signals = stack.enter_context(saves_noted()) if saves else Signals()
            saving = TrainerSaves(
                args, self.engine, windows, log, self._group, signals, self._torch
            )
            saving.resume(resume_from_checkpoint or args.resume_from_checkpoint)
            self._best = BestModel(args, self.engine, log, first)
            figures = self._loop(windows, run, log, profiling, saving)
        self._ended = True
        return TrainOutput(log.state.global_step, log.mean_loss(), figures)

    def _train_data(self) -> Any:
        if self._overrides("get_train_dataloader"):
            return self.get_train_dataloader()
        if self.train_dataset is None:
            raise Error("[trainer] there is no train_dataset; give one to poise.Trainer")
        trainer_data.check_train(self.train_dataset)
        return self.train_dataset

    def _collate(self) -> Callable:
        unused = self.args.remove_unused_columns
        return columns.collate_for(
            self.model, self.data_collator, self.processing_class, unused, self.label_names
        )

    def _take(self, model: nn.Module) -> None:
        # One without memory gets it from the engine, and one that is cut into shards moves with it.
        waits = meta.is_meta(model) or self.args.shards_parameters
        self.model = model if waits else model_view.moved_to(model, self._device)
        loss_func, smoothing = self._compute_loss_func, self.args.label_smoothing_factor
        if smoothing > 0 and loss_func is None:
            shifted = ModelCall(model, None, self._shift_labels).shift_labels
            loss_func = LabelSmoothing(smoothing, shifted)
        self._call = ModelCall(model, loss_func, self._shift_labels, self.args.label_names)
        self.label_names = list(self._call.label_names)
        self._usual_loss: Callable[[Any], Loss] = self._call
        if self.args.loss_chunk_tokens > 0:
            if loss_func is not None:
                what = "compute_loss_func" if smoothing == 0 else "label_smoothing_factor"
                raise Error(
                    f"[trainer] loss_chunk_tokens with {what}, which gets whole logits; leave one of "
                    "them out"
                )
            self._usual_loss = ChunkedHead(self.model, self._call, self.args.loss_chunk_tokens)
        self._numbers = wrong_batch.Numbers(model, self.label_names, makes_loss=loss_func is None)

    def _loop(
        self,
        windows: WindowIterator,
        run: RunLength,
        log: RunLog,
        profiling: Profiling,
        saving: TrainerSaves,
    ) -> dict[str, float]:
        self.model.train()
        log.event("on_train_begin")
        if self.args.eval_on_start or saving.owes_evaluation:
            self._evaluate_and_log(log, saving)
        epoch = None
        while log.state.global_step < log.state.max_steps:
            if self.args.accumulation_ramp_updates > 0:
                windows.set_accumulation(self.engine.accumulation)
            saving.before_window()
            profiling.before(log.state.global_step + 1)
            window = next(windows, None)
            if window is None:
                break  # an epoch was left early, so that there are fewer updates than planned
            if windows.epoch != epoch:
                if (epoch := saving.epoch_left_open(windows.epoch, epoch)) is not None:
                    self._end_epoch(log, saving)
                    epoch = None
                    if log.stop_due():
                        break
                epoch = windows.epoch
                log.begin_epoch(epoch)
            try:
                updated = self._update(window, log, profiling, saving)
            except WindowDropped:
                if not saving.dropped_by_signal():
                    raise  # a loss of the user's threw it
                saving.after_dropped_window()
            if updated:
                saving.after_update()
            if log.stop_due():
                break
            if log.epoch_stop_due():
                windows.skip_epoch()
                if run.updates_per_epoch is not None:
                    windows.end_after(run.epochs)
        if saving.epoch_left_open(None, epoch) is not None:
            self._end_epoch(log, saving)
        saving.finish()
        self._best.load()
        figures = log.end()
        log.event("on_train_end")
        return figures

    def _end_epoch(self, log: RunLog, saving: TrainerSaves) -> None:
        with generators.untouched():
            log.event("on_epoch_end")
            log.end_epoch()
            if self.args.eval_strategy == "epoch" and log.state.epoch >= self.args.eval_delay:
                self._evaluate_and_log(log, saving)
        saving.after_epoch()

    def _update(
        self, window: list[Any], log: RunLog, profiling: Profiling, saving: TrainerSaves
    ) -> bool:
        """Whether there was one: a callback may leave run or epoch within a window."""
        update = log.state.global_step + 1
        log.event("on_step_begin")
        if log.drops(window):
            return False
        if self._torch is not None:
            self._torch.before_update()
        counts: list[int] = []
        if self._loss_of is self._call and self._call.has_parts:
            counts = ranks.sums_of(self._group, self._call.window_counts(window))

        def run(batches: list[Any]) -> StepResult | None:
            is_overridden = self._overrides("training_step")
            if is_overridden or hand_update.is_wanted(self.callbacks):
                self._step.begin_window(len(batches), self.args.accumulation, is_overridden)
                return hand_update.step(
                    self.engine,
                    batches,
                    self._training_step,
                    self._loss,
                    log,
                    counts,
                    saving.end_is_asked,
                )
            return step(
                self.engine,
                batches,
                log.utilization.around(self._loss),
                update == 1,
                log.note,
                log.last_save,
                counts,
                saving.drop_if_asked,
            )

        result = run(window) if self._halving is None else self._halving(window, run)
        if result is None:
            return False
        if self._torch is not None:
            self._torch.after_update(result)
        profiling.after(update)
        if update == 1 and self._found is not None:
            for line in trainer_balance.compared(self._found, result):
                log.note(line)
        log.utilization.window(window)
        log.update(result)
        if update == 1 and self._found and (plan := trainer_balance.metrics(self._found, result)):
            log.plan(plan)
        every = self._eval_every(log)
        if self.args.eval_strategy == "steps" and update % every == 0:
            if update >= self.args.eval_delay:
                log.control.should_evaluate = True
        if log.evaluation_due():
            self._evaluate_and_log(log, saving)
        return True

    def _use(self) -> dict[str, Any]:
        """What a run's log compares with: what the device has, what the engine has done."""
        args, memory = self.args, settings_of(self.engine.config)["memory"]["budget_bytes"]
        peak = utilization.peak_flops(args.peak_flops, args.device, args.bf16 or args.fp16)
        return {
            "utilization": utilization.Utilization(self.model, peak),
            "capacity": utilization.memory_bytes(memory, args.device),
            "earlier": (self.engine.updates, self.engine.skipped_updates),
        }

    @property
    def _loss_of(self) -> Callable[[Any], Loss]:
        return self._given_loss if self._overrides("compute_loss") else self._usual_loss

    def _loss(self, batch: Any) -> Loss:
        return self._loss_of(self._on_device(batch))

    def _on_device(self, batch: Any) -> Any:
        if self._device.type == "cuda":
            self._numbers.check(batch, makes_loss=not self._overrides("compute_loss"))
        return trainer_data.to_device(batch, self._device)

    def _training_step(self, batch: Any) -> torch.Tensor:
        batch = self._on_device(batch)
        count = self._call.count(batch)
        return self._step.run(
            self.engine, lambda: self.training_step(self.model, batch, count), count
        )

    def _eval_every(self, log: RunLog) -> int:
        every = (
            self.args.eval_steps if self.args.eval_steps is not None else self.args.logging_steps
        )
        return max(1, updates_of(every, log.state.max_steps))

    def _event(self, name: str, **details: Any) -> None:
        details = {**self._details(), **details}
        callbacks.call(self.callbacks, name, self.args, self.state, self.control, **details)

    def _details(self, **more: Any) -> dict[str, Any]:
        """What every event of a callback gets."""
        return {
            "model": self.model,
            "processing_class": self.processing_class,
            "tokenizer": self.processing_class,
            "optimizer": engine_view.optimizer(self.optimizer, self.engine),
            "lr_scheduler": engine_view.scheduler(self.lr_scheduler, self.optimizer, self.engine),
            "eval_dataloader": self.eval_dataset,
            **more,
        }

    def _check_eval_dataset(self) -> None:
        if self.args.eval_strategy != "no" and self.eval_dataset is None:
            if not self._overrides("get_eval_dataloader"):
                raise Error(
                    f"[trainer] eval_strategy is {self.args.eval_strategy}, but there is no "
                    "eval_dataset; give one to poise.Trainer"
                )

    def _show_banner(self, run: RunLength, data: Any) -> None:
        if self.args.is_quiet or self._group.rank > 0:
            return
        settings = settings_of(self.engine.config)
        settings["checkpointing"] = self.engine.checkpointing
        examples = trainer_data.examples(data)
        lines = banner.banner(self.model, self.args, run, settings, examples, self._group)
        print("\n".join(lines), file=sys.stderr)
