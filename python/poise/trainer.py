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
    banner,
    evaluation,
    foreign,
    meta,
    model_choice,
    model_view,
    prediction,
    ranks,
    trainer_balance,
    trainer_data,
)
from poise._C import Error, StepResult
from poise.balance import Balance
from poise.chunked_head import ChunkedHead
from poise.config import settings_of
from poise.data import WindowIterator
from poise.engine import Engine
from poise.loss import Loss
from poise.metrics_log import MetricsLog, NoMetrics
from poise.model_call import ModelCall
from poise.prediction import EvalPrediction, PredictionOutput
from poise.profiling import Profiling
from poise.progress import Progress
from poise.run_length import RunLength
from poise.run_log import RunLog
from poise.schedule_arguments import updates_of
from poise.seeding import seed_everything
from poise.training_arguments import TrainingArguments
from poise.update import step


class TrainOutput(NamedTuple):
    """What a run comes to: updates, mean loss over them, metrics by name."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer:
    """Trains a model; names as in transformers' Trainer.

    Where torchrun, Slurm or mpirun started several ranks, all of them make the same Trainer and the
    same calls; each gets its share of the data, the first one writes and shows. All have rank 0's
    parameters, and the same results of evaluate() and predict().

    Args:
      model: returns the loss from forward (a scalar, a tuple that begins with it, an output with
        .loss), or anything that compute_loss_func makes a loss of.
      args: None: all defaults.
      data_collator: makes a batch of a list of samples.
      train_dataset: a dataset, or a DataLoader.
      eval_dataset: the same for evaluate().
      model_init: makes the model instead, anew for every train().
      compute_loss_func: (outputs, labels) -> a mean, (mean, n) or poise.Loss.
      compute_metrics: poise.prediction.EvalPrediction -> a dictionary of numbers, for evaluate() and
        predict().
      preprocess_logits_for_metrics: (predictions, labels) of a batch -> what is kept of it for
        compute_metrics and predict(), for example the class instead of all logits.
      callbacks: objects with methods of poise.callbacks.TrainerCallback.
      processing_class, optimizers: refused with a reason where they are given.
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
        *,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], Any] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        units: model_view.UnitChoice = None,
        shift_labels: bool | None = None,
    ) -> None:
        foreign.refuse(processing_class, optimizers)
        self.args = args if args is not None else TrainingArguments()
        self._group = ranks.join(self.args.device, self.args.ddp_backend, self.args.ddp_timeout)
        self.data_collator = data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.callbacks = list(callbacks or [])
        self.engine: Engine | None = None  # of the last train()
        self._model_init, self._units = model_init, units
        self._compute_loss_func, self._shift_labels = compute_loss_func, shift_labels
        self._found: Balance | None = None  # where the arguments left it open
        self._halving: trainer_balance.Halving | None = None
        self._check_eval_dataset()
        self._take(model_choice.first(model, model_init, self.args.seed))

    def train(self) -> TrainOutput:
        """Trains from the model's present values (model_init's, if given) to the end of the run.

        Ctrl-C ends it between two micro-batches: the open window is dropped, files are closed, and
        KeyboardInterrupt goes on to the caller. A non-finite loss or gradient stops it with the
        first parameter, input or module that is not finite, unless on_nonfinite says skip.
        """
        if self.train_dataset is None:
            raise Error("[trainer] there is no train_dataset; give one to poise.Trainer")
        args, folder, first = self.args, Path(self.args.output_dir), self._group.rank == 0
        if args.balance_is_open:
            trainer_balance.check_data(self.train_dataset, args)
        windows = trainer_data.train_windows(self.train_dataset, args, self.data_collator)
        run = RunLength.of(
            trainer_data.batches_per_epoch(self.train_dataset, args),
            args,
            trainer_data.splits_over(self.train_dataset, args),
        )
        if self.engine is not None:  # the memory of an earlier run goes first
            self.engine.give_back()
            self.engine = None
        if self._model_init is not None:
            self._take(model_choice.made(self._model_init, args.seed))
        seed_everything(args.seed + self._group.rank)  # dropout differs from rank to rank
        with contextlib.ExitStack() as stack:
            stack.enter_context(ranks.told_to_others(self._group))
            stack.enter_context(ranks.only_first_logs(self._group))
            self.engine = Engine(self.model, args.to_config(run.updates), self._units, self._group)
            found = self._find_balance() if args.balance_is_open else None
            if found is not None:
                args = self.args
                windows = trainer_data.train_windows(self.train_dataset, args, self.data_collator)
            stack.enter_context(contextlib.closing(windows))
            metrics = stack.enter_context(
                MetricsLog(folder / "metrics.jsonl") if first else NoMetrics()
            )
            self._show_banner(run)
            bar = stack.enter_context(Progress(run.updates, args.disable_tqdm if first else True))
            banner.warn_batch_norm(self.model, args.accumulation, self._group.size)
            log = RunLog(args, run, metrics, bar, self.callbacks, self._group)
            self._found = found
            self._halving = trainer_balance.Halving(self.engine, log.note) if found else None
            for line in trainer_balance.lines(found, args.memory_budget) if found else ():
                log.note(line)
            profiling = stack.enter_context(
                contextlib.closing(Profiling(args.profile_steps if first else None, folder))
            )
            self._loop(windows, log, profiling)
        return TrainOutput(log.state.global_step, log.mean_loss(), log.summary())

    def evaluate(
        self, eval_dataset: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss over a dataset, weighed by tokens, and what compute_metrics makes of it."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise Error(
                "[trainer] there is no eval_dataset; give one to poise.Trainer or to evaluate()"
            )
        if self.compute_metrics is not None:
            return self._predict(dataset, metric_key_prefix, with_loss=True).metrics
        with ranks.told_to_others(self._group):
            return evaluation.evaluate(
                self.model,
                self._share_of(dataset),
                self._loss,
                self._forward_scope,
                metric_key_prefix,
                self._group,
            )

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """What the model returns for a dataset (without its loss), in order, as numpy arrays.

        Samples need no labels; where they have them, metrics hold the loss and what
        compute_metrics makes of them. Arrays of batches that differ in length are padded with -100.
        """
        return self._predict(test_dataset, metric_key_prefix, with_loss=False)

    def _predict(self, dataset: Any, prefix: str, with_loss: bool) -> PredictionOutput:
        def call(batch: Any) -> tuple[Loss | None, Any, Any]:
            return self._call.predict(trainer_data.to_device(batch, self.args.device), with_loss)

        with ranks.told_to_others(self._group):
            return prediction.predict(
                self.model,
                self._share_of(dataset),
                call,
                self._forward_scope,
                prefix,
                self.preprocess_logits_for_metrics,
                self.compute_metrics,
                self._group,
            )

    def _share_of(self, dataset: Any) -> Any:
        return trainer_data.eval_share_of(dataset, self.args, self.data_collator, self._group)

    def _take(self, model: nn.Module) -> None:

        # One without memory gets it from the engine, on the device of the group.
        self.model = model if meta.is_meta(model) else model.to(self.args.device)
        self._call = ModelCall(model, self._compute_loss_func, self._shift_labels)
        self._loss_of: Callable[[Any], Loss] = self._call
        if self.args.loss_chunk_tokens > 0:
            if self._compute_loss_func is not None:
                raise Error(
                    "[trainer] loss_chunk_tokens with compute_loss_func, which gets whole logits; "
                    "leave one of them out"
                )
            self._loss_of = ChunkedHead(self.model, self._call, self.args.loss_chunk_tokens)

    def _loop(self, windows: WindowIterator, log: RunLog, profiling: Profiling) -> None:
        self.model.train()
        log.event("on_train_begin", model=self.model)
        epoch = None
        for window in windows:
            if windows.epoch != epoch:
                if epoch is not None:
                    self._end_epoch(log)
                epoch = windows.epoch
                log.event("on_epoch_begin")
            self._update(window, log, profiling)
            if not log.running():
                break
        self._end_epoch(log)
        log.event("on_train_end")

    def _end_epoch(self, log: RunLog) -> None:
        log.event("on_epoch_end")
        if self.args.eval_strategy == "epoch":
            self._evaluate_and_log(log)

    def _update(self, window: list[Any], log: RunLog, profiling: Profiling) -> None:
        update = log.state.global_step + 1
        profiling.before(update)
        log.event("on_step_begin")

        def run(batches: list[Any]) -> StepResult:
            return step(self.engine, batches, self._loss, first=update == 1, note=log.note)

        result = run(window) if self._halving is None else self._halving(window, run)
        profiling.after(update)
        if update == 1 and self._found is not None:
            for line in trainer_balance.compared(self._found, result):
                log.note(line)
        log.update(result)
        if self.args.eval_strategy == "steps" and update % self._eval_every(log) == 0:
            log.control.should_evaluate = True
        if log.evaluation_due():
            self._evaluate_and_log(log)

    def _find_balance(self) -> Balance:
        found = trainer_balance.find(
            self.engine, self.args, self.train_dataset, self.data_collator, self._call, self._loss
        )
        chosen = found.chosen
        policy = self.engine.checkpointing
        self.args = self.args.with_balance(chosen.micro_batch, policy)
        return found

    def _loss(self, batch: Any) -> Loss:
        return self._loss_of(trainer_data.to_device(batch, self.args.device))

    def _forward_scope(self) -> contextlib.AbstractContextManager:
        """Of an evaluation: the engine's where there is one, so that the ledger counts it too."""
        if self.engine is not None:
            return self.engine.forward_scope()
        dtype = self.args.autocast_dtype
        return torch.autocast(
            self.args.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False
        )

    def _evaluate_and_log(self, log: RunLog) -> None:
        metrics = self.evaluate()
        log.write(metrics)
        log.event("on_evaluate", metrics=metrics)

    def _eval_every(self, log: RunLog) -> int:
        every = (
            self.args.eval_steps if self.args.eval_steps is not None else self.args.logging_steps
        )
        return max(1, updates_of(every, log.state.max_steps))

    def _check_eval_dataset(self) -> None:
        if self.args.eval_strategy != "no" and self.eval_dataset is None:
            raise Error(
                f"[trainer] eval_strategy is {self.args.eval_strategy}, but there is no "
                "eval_dataset; give one to poise.Trainer"
            )

    def _show_banner(self, run: RunLength) -> None:
        if self.args.disable_tqdm is True or self._group.rank > 0:
            return
        settings = settings_of(self.engine.config)
        settings["checkpointing"] = self.engine.checkpointing
        examples = trainer_data.examples(self.train_dataset)
        lines = banner.banner(self.model, self.args, run, settings, examples, self._group)
        print("\n".join(lines), file=sys.stderr)
