"""The engine that poise.initialize returns: DeepSpeed's calls over an engine of poise."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from poise import _C, loop_state, ranks
from poise._C import Error, StepResult
from poise.config import settings_of
from poise.deepspeed.config import Settings
from poise.deepspeed.monitor.monitor import MonitorMaster
from poise.engine import Engine
from poise.loss import Count
from poise.wrapped_model import WrappedModel

logger = logging.getLogger("poise")

CLIENT = "deepspeed.client_state"  # of a save's texts

_STAGES = (
    "there are no pipeline stages; call the engine, backward() and step() for each micro-batch"
)
_ABSENT = {
    "train_batch": _STAGES,
    "eval_batch": f"{_STAGES}; engine.eval() and a call under torch.no_grad() evaluate",
    "is_first_stage": _STAGES,
    "is_last_stage": _STAGES,
    "flops_profiler": "poise bench and poise plan measure",
}
_faces: weakref.WeakKeyDictionary[Engine, weakref.ref[DeepSpeedEngine]] = (
    weakref.WeakKeyDictionary()
)


def of(engine: Engine) -> DeepSpeedEngine:
    """The one that initialize() made over it."""
    face = _faces[engine]() if engine in _faces else None
    if face is None:
        raise Error("[deepspeed] the parameter's engine is none of deepspeed.initialize()")
    return face


class DeepSpeedEngine(WrappedModel):
    """Called, it is the model; backward() (or loss.backward() of a loss that was computed from its outputs)
    and step() once per micro-batch train it.

    Attributes:
      optimizer, lr_scheduler, training_dataloader: as initialize() returned them.
      monitor: gets loss, rate and loss scale of every update, and what the script writes into it.
      global_steps: windows closed, applied or not.
      micro_steps: micro-batches done.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        loader: Iterable[Any] | None,
        settings: Settings,
    ) -> None:
        super().__init__(engine, optimizer, loader, [] if scheduler is None else [scheduler])
        self._widens = False  # outputs have the model's type, as in DeepSpeed
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self.training_dataloader = self.loader
        self._micro_batch = settings.micro_batch
        self._print_every = settings.steps_per_print
        self.monitor = MonitorMaster(settings.monitor)
        self.global_steps = self.micro_steps = 0
        self._before_backward = True
        self._boundary: bool | None = None
        self._open = True  # False inside no_sync()
        self._has_sums = False  # of the window, which holds all its micro-batches
        _faces[engine] = weakref.ref(self)

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(f"the engine of poise.deepspeed has no {name}: {_ABSENT[name]}")
        return super().__getattr__(name)

    # One micro-batch.

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it is, for engine.scale(loss).backward(): backward() of a loss scales it."""
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the engine."""
        return self(*args, **kwargs)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        tokens: Count = None,
    ) -> torch.Tensor:
        """Accumulates a micro-batch's gradient and returns its loss.

        Args:
          loss: its mean, not divided by the accumulation.
          tokens: how many tokens (or samples) it is a mean over; None: what the labels tell.
        """
        if retain_graph:
            raise Error("[deepspeed] backward(retain_graph=True): a micro-batch has one backward")
        if not scale_wrt_gas and self.engine.accumulation > 1:
            raise Error(
                f"[deepspeed] backward(scale_wrt_gas=False) with {self.engine.accumulation} micro-batches: "
                "the mean over the window is poise's to make; give the micro-batch's own mean"
            )
        super().backward(loss, tokens)
        # A window that was discarded had sums, and this is another one.
        self._before_backward, self._has_sums = False, False
        return loss

    def step(self, lr_kwargs: Any = None, last: bool = False) -> StepResult | None:
        """The update where the window is full; else nothing.

        Args:
          last: closes the window although it is not full.

        Raises poise.Error without a backward() since the last step(), as after a forward that failed:
        the window would close short of a micro-batch.
        """
        if not self._open:
            raise Error("[deepspeed] step() inside no_sync(); leave it first")
        if self._before_backward and not last:
            raise Error(
                "[deepspeed] step() without a backward() since the last step(); the window holds "
                f"{self.engine.micro_batches} of {self.engine.accumulation} micro-batches: leave step() out "
                "for a micro-batch that failed, or close the window with step(last=True)"
            )
        self._syncs = last or self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._before_backward, self._has_sums = True, False
        if not self._syncs:
            return None
        try:
            result = super().step()
        finally:
            self._boundary = None  # of this micro-batch, whether its update came or failed
        self.global_steps += 1
        if result.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._print(result)
        self._write_events(result)
        return result

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one of its window: the next step() updates."""
        if self._boundary is not None:
            return self._boundary
        return self._closes(more=self._before_backward)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says it for this micro-batch, instead of the count."""
        self._boundary = bool(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around micro-batches that no step() follows; at every stage, with the same sums."""
        self._open = False
        try:
            yield
        finally:
            self._open = True

    def zero_grad(self) -> None:
        """Nothing: gradients are the engine's, and zero after each update. An open window goes on, so
        that a loop may call it at each micro-batch; engine.discard_window() drops one."""

    def _drop_full_window(self) -> None: ...  # the optimizer's zero_grad() is the same

    def window_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """The window's mean gradient, after the backward() of its last micro-batch and before step(),
        which takes what is written into it; all ranks."""
        if self._before_backward or not self.is_gradient_accumulation_boundary():
            raise Error(
                "[deepspeed] a gradient is there between the backward() of a window's last micro-batch "
                f"and step(); this window holds {self.engine.micro_batches} of "
                f"{self.engine.accumulation} micro-batches"
            )
        if not self._has_sums:
            self.engine.begin_update()
            self._has_sums = True
        return self.engine.gradient(parameter)

    def empty_partition_cache(self) -> None:
        """Nothing: no parameter is kept whole between windows."""

    def allreduce_gradients(self, bucket_size: Any = None) -> None:
        """Nothing: gradients are joined as they come and when the window closes."""

    # What happened.

    def was_step_applied(self) -> bool:
        """Whether the last step() changed the parameters."""
        return self.step_was_applied

    @property
    def skipped_steps(self) -> int:
        return self.engine.skipped_updates

    @property
    def global_samples(self) -> int:
        return self.global_steps * self.train_batch_size()

    def get_global_grad_norm(self) -> float | None:
        """Of the last update, before clipping; None before the first."""
        return None if self.last_result is None else self.last_result.grad_norm

    def get_lr(self) -> list[float]:
        """Of each group, for the next update."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Of each group: betas, or momentum."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.engine.loss_scale

    def loss_scale(self) -> float:
        """What was set: a fixed loss scale; 0: dynamic."""
        return self._settings["precision"]["loss_scale"]

    def dynamic_loss_scale(self) -> bool:
        return self.fp16_enabled() and self.loss_scale() == 0

    # What was set.

    def train_batch_size(self) -> int:
        """Samples of an update, over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.engine.accumulation * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch or 1

    def gradient_accumulation_steps(self) -> int:
        return self.engine.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.engine.accumulation,
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another accumulation from the next window on; the micro-batch stays."""
        part = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size < 1 or train_batch_size % part:
            raise Error(
                f"[deepspeed] set_train_batch_size({train_batch_size}): micro-batches of "
                f"{self.train_micro_batch_size_per_gpu()} on {self.world_size} ranks make multiples "
                f"of {part}"
            )
        self.engine.set_accumulation(train_batch_size // part)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """What the next micro-batches hold; the loader is yours to change."""
        if micro_batch_size < 1:
            raise Error(
                f"[deepspeed] set_train_micro_batch_size({micro_batch_size}): give 1 or more"
            )
        self._micro_batch = micro_batch_size

    def gradient_clipping(self) -> float:
        return self._settings["optimizer"]["max_grad_norm"]

    def steps_per_print(self) -> int:
        """Updates from one line to the next; 0: none."""
        return self._print_every

    def zero_optimization_stage(self) -> int:
        return self._settings["zero"]["stage"]

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def fp16_enabled(self) -> bool:
        return self._settings["precision"]["dtype"] == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._settings["precision"]["dtype"] == "bf16"

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def local_rank(self) -> int:
        return ranks.here().local or 0

    @property
    def global_rank(self) -> int:
        return self.engine.group.rank

    @property
    def world_size(self) -> int:
        return self.engine.group.size

    dp_world_size = world_size

    # Saving.

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves the state of the run in the folder save_dir/tag; between windows, all ranks.

        Args:
          tag: name of the save; None: global_step and the number of windows.
          client_state: what load_checkpoint gives back: numbers, texts, lists, dictionaries.
          save_latest, exclude_frozen_parameters: accepted; the latest save is found by its number,
            and a save is whole.
        """
        texts = {CLIENT: loop_state.as_json(dict(client_state or {}), "client_state")}
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self.save(save_dir, name=name, user=texts)
        return True

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """(path, client_state) of the save of that tag, or of the latest; (None, None), with a
        warning, where a folder has none. Any number of ranks and any stage loads it; all ranks call.

        Args:
          load_module_only: parameters and buffers alone; so does load_optimizer_states=False.
          load_lr_scheduler_states: accepted; the schedule goes on with the optimizer.
          load_module_strict, custom_load_fn: what does not fit is an Error; a function is refused.
        """
        if custom_load_fn is not None:
            raise Error(
                "[deepspeed] load_checkpoint(custom_load_fn=...): a save has one way to load"
            )
        folder = Path(load_dir)
        path = _C.find_save(str(folder)) if tag is None else str(folder / str(tag))
        if not path:
            logger.warning("[deepspeed] there is no save in %s", folder)
            return None, None
        loaded = self.load(path, weights_only=load_module_only or not load_optimizer_states)
        return loaded.path, loop_state.from_json(loaded.user.get(CLIENT, "{}"))

    def _counters(self) -> dict[str, Any]:
        return {"global_steps": self.global_steps, "micro_steps": self.micro_steps}

    def _take_counters(self, counters: Mapping[str, Any]) -> None:
        self.global_steps = counters.get("global_steps", self.engine.updates)
        self.micro_steps = counters.get("micro_steps", 0)

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", **_: Any
    ) -> bool:
        """The model's whole state_dict, on the CPU, as torch.save writes it; all ranks call."""
        if os.path.basename(save_filename) != save_filename:
            raise Error(f"[deepspeed] save_16bit_model: {save_filename!r} is no name of a file")
        state = self.engine.state_dict(rank=0, device="cpu")
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        self.engine.group.barrier("save_16bit_model")
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return self.state_dict()

    def load_module_state_dict(self, state_dict: Any, strict: bool = True, **_: Any) -> Any:
        return self.load_state_dict(state_dict, strict)

    def destroy(self) -> None:
        """Gives the model its parameters back; the engine is of no more use then."""
        self.engine.give_back()

    @property
    def _settings(self) -> dict[str, Any]:
        return settings_of(self.engine.config)

    def _print(self, result: StepResult) -> None:
        if self._print_every and self.global_steps % self._print_every == 0:
            if self.global_rank == 0:
                rates = ", ".join(f"{rate:.6g}" for rate in self.get_lr())
                print(
                    f"step={self.global_steps}, skipped={result.skipped}, lr=[{rates}], "
                    f"loss={result.loss:.6g}, grad_norm={result.grad_norm:.6g}",
                    file=sys.stderr,
                )

    def _write_events(self, result: StepResult) -> None:
        """By DeepSpeed's names and at its steps: a loss at the samples before its update."""
        if not self.monitor.enabled:
            return
        after = self.global_samples
        events = [
            ("Train/Samples/train_loss", result.loss, after - self.train_batch_size()),
            ("Train/Samples/lr", self.get_lr()[0], after),
        ]
        if self.fp16_enabled():
            events.append(("Train/Samples/loss_scale", self.cur_scale, after))
        self.monitor.write_events(events)
