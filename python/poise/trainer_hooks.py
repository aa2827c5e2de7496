"""The methods of transformers' Trainer that subclasses override and scripts call."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from poise import trackers, trainer_data, trainer_optimizer, wrong_batch
from poise._C import Error
from poise.label_smoothing import LabelSmoother
from poise.labels import labels_in
from poise.loss import Count, Loss, as_loss
from poise.metrics_log import python_values
from poise.script_calls import ScriptCalls
from poise.trainer_saving import STATE_FILE, whole_copies, write_model


class TrainerHooks(ScriptCalls):
    """Base of poise.Trainer: what it does by default, where nobody overrides it.

    Overridden methods are used as transformers uses them; without one the engine takes shorter ways.
    """

    # One micro-batch. What a copy of transformers' compute_loss or training_step reads besides:

    model_accepts_loss_kwargs = False  # a loss is its micro-batch's mean, by the labels in it
    loss_is_scaled_for_ga = None
    current_gradient_accumulation_steps = 1  # a loss is to be divided by: the engine makes the mean
    use_apex = is_deepspeed_enabled = is_fsdp_enabled = False

    @property
    def compute_loss_func(self) -> Any:
        """The given one; a subclass may set another."""
        return self._compute_loss_func

    @compute_loss_func.setter
    def compute_loss_func(self, function: Any) -> None:
        self._compute_loss_func = function
        self._take(self.model)

    @property
    def label_smoother(self) -> LabelSmoother | None:
        """Where label_smoothing_factor asks for it."""
        factor = self.args.label_smoothing_factor
        return LabelSmoother(factor) if factor > 0 else None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Count = None,
    ) -> Any:
        """The mean loss of a micro-batch, or (loss, outputs).

        Args:
          num_items_in_batch: how many labels of this micro-batch count. A loss is the mean over
            them: the engine weighs it by their number, which makes the window's mean exact.
        """
        loss, outputs = self._call.loss_and_outputs(inputs)
        value = loss.value if loss.kind == "mean" else loss.value.sum() / loss.count
        return (value, outputs) if return_outputs else value

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Count = None
    ) -> torch.Tensor:
        """Forward and backward of a micro-batch; its loss, without gradient."""
        self._step.leave_forward()  # that of a subclass which calls this
        with self.engine.forward_scope():
            loss = self._run_log.utilization.around(self._loss)(inputs)
        self._step.backward(loss)
        return loss.value.detach()

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager:
        """Around a forward of a training_step of one's own, which is in the run's precision anyway."""
        return contextlib.nullcontext()

    autocast_smart_context_manager = compute_loss_context_manager  # its older name

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on this rank's device, where a training_step gets it already."""
        return trainer_data.to_device(inputs, self._device)

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> tuple[Any, Any]:
        """Ranks are data-parallel: a batch is whole on each."""
        return contextlib.nullcontext, inputs

    # Data.

    def get_train_dataloader(self) -> DataLoader:
        """The training data in micro-batches; its order is then poise's, seeded and resumable."""
        if self.train_dataset is None:
            raise Error("[trainer] there is no train_dataset; give one to poise.Trainer")
        if isinstance(self.train_dataset, DataLoader):
            return self.train_dataset
        own_order = isinstance(self.train_dataset, IterableDataset)
        shuffle = not own_order and self.args.train_sampling_strategy == "random"
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=shuffle,
            drop_last=self.args.dataloader_drop_last,
            **trainer_data.loader_options(self.args, self._collate()),
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        return trainer_data.eval_batches(self._named(dataset), self.args, self._collate())

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return trainer_data.eval_batches(test_dataset, self.args, self._collate())

    # Optimizer.

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """A torch optimizer as the arguments say, kept as self.optimizer."""
        if self.optimizer is None:
            self.optimizer = trainer_optimizer.adamw(model or self.model, self.args)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The arguments' schedule over self.optimizer, kept as self.lr_scheduler."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            self.lr_scheduler = trainer_optimizer.scheduler(
                optimizer, self.args, num_training_steps
            )
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    # Log and callbacks.

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Writes a line: to the history, metrics.jsonl and the callbacks."""
        if self._run_log is not None:
            self._run_log.record(logs)
            return
        logs = python_values(logs)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._event("on_log", logs=logs)

    def add_callback(self, callback: Any) -> None:
        """An object, or a class that makes one without arguments."""
        self.callbacks.append(trackers.listener(callback))

    def pop_callback(self, callback: Any) -> Any:
        """Takes the first one out that is it, or of its class, and returns it."""
        for one in self.callbacks:
            if one == callback or (isinstance(callback, type) and isinstance(one, callback)):
                self.callbacks.remove(one)
                return one
        return None

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

    # Of scripts.

    def is_world_process_zero(self) -> bool:
        """Whether this is the first of all ranks."""
        return self._group.rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.args.local_process_index == 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model's own files with whole tensors, and those of processing_class; all ranks.

        A model without save_pretrained becomes model.safetensors.

        Args:
          output_dir: None: that of the arguments.
        """
        folder = Path(output_dir or self.args.output_dir)
        values = whole_copies(self.model, self.engine)
        if not self.is_world_process_zero():
            return
        folder.mkdir(parents=True, exist_ok=True)
        if callable(getattr(self.model, "save_pretrained", None)):
            self.model.save_pretrained(folder, state_dict=values)
        else:
            write_model(values, folder / "model.safetensors")
        if callable(getattr(self.processing_class, "save_pretrained", None)):
            self.processing_class.save_pretrained(folder)

    def save_state(self) -> None:
        """trainer_state.json in output_dir: counters and the history of lines."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            _write_json(folder / STATE_FILE, dataclasses.asdict(self.state))

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Nothing: a card is the author's to write."""

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        raise Error(
            "[trainer] push_to_hub: poise sends nothing over a network; save_model() writes a folder "
            "that transformers' push_to_hub takes"
        )

    def _whole_model(self) -> contextlib.AbstractContextManager:
        """While it lasts all parameters are whole, at every stage; all ranks."""
        return contextlib.nullcontext() if self.engine is None else self.engine.gathered()

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints them, one a line, on the first rank."""
        if not self.is_world_process_zero():
            return
        print(f"***** {split} metrics *****")
        width = max((len(name) for name in metrics), default=0)
        for name in sorted(metrics):
            print(f"  {name:{width}} = {metrics[name]}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Into <split>_results.json of output_dir, and all_results.json with the other splits'."""
        if Path(split).name != split:
            raise Error(f"[trainer] save_metrics: {split!r} is no name of a file")
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / f"{split}_results.json", dict(metrics))
        if combined:
            path = folder / "all_results.json"
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            _write_json(path, {**before, **metrics})

    # How poise.Trainer uses them.

    def _named(self, dataset: Any) -> Any:
        """The dataset that the Trainer has by that name, where it is one."""
        if not isinstance(dataset, str):
            return dataset
        known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        if dataset not in known:
            raise Error(
                f"[trainer] there is no eval_dataset called {dataset!r}; the Trainer has by name: "
                f"{', '.join(known) or 'none'}"
            )
        return known[dataset]

    def _overrides(self, name: str) -> bool:
        """A subclass, or this object: scripts also set trainer.compute_loss and the like."""
        return name in vars(self) or getattr(type(self), name) is not getattr(TrainerHooks, name)

    def _given_loss(self, batch: Any) -> Loss:
        """The loss of a subclass's compute_loss, with the number of labels that counted."""
        count = self._call.count(batch)
        with wrong_batch.explained(self.model, batch, self.label_names):
            loss = self.compute_loss(self.model, batch, **self._items(count))
        return _counted(loss, count)

    def _given_outputs(self, batch: Any, with_loss: bool) -> tuple[Loss | None, Any, Any]:
        """The same with outputs and labels, as model_call.ModelCall.predict."""
        labels = labels_in(batch, self.label_names)
        if labels is None and not with_loss:
            return self._call.predict(batch)
        count = self._call.count(batch)
        with wrong_batch.explained(self.model, batch, self.label_names):
            loss, outputs = self.compute_loss(
                self.model, batch, return_outputs=True, **self._items(count)
            )
        if isinstance(outputs, (tuple, list)):
            outputs = outputs[1:]
        return _counted(loss, count), outputs, labels

    def _items(self, count: Count) -> dict[str, Count]:
        parameters = inspect.signature(self.compute_loss).parameters.values()
        takes = any(p.name == "num_items_in_batch" or p.kind is p.VAR_KEYWORD for p in parameters)
        return {"num_items_in_batch": count} if takes else {}


def _counted(loss: Any, count: Count) -> Loss:
    loss = as_loss(loss)
    if loss.count is None and loss.kind == "mean":
        loss.count = count
    return loss


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(
        json.dumps(python_values(values), indent=4, sort_keys=True) + "\n", encoding="utf-8"
    )
