"""A model that trains by an engine in its user's own loop, micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from poise import loop_state, plain_backward, whole_state, wrong_batch
from poise._batch import cast_inputs, count_targets
from poise._C import Error, StepResult
from poise.config import settings_of
from poise.engine import Engine
from poise.labels import labels_in
from poise.loss import Count, as_loss
from poise.marked_loader import MarkedLoader
from poise.model_call import ModelCall
from poise.torch_optimizer import HandedOver

logger = logging.getLogger("poise")


class WrappedModel:
    """Called, it is the model's forward in the precision of the run; its other attributes are the
    model's (train(), eval(), parameters(), config, ...).

    A window is as many backward() as `accumulation`; the last one of an epoch may be shorter, where
    the loader is known. Each micro-batch weighs as many tokens (or samples) as its loss is a mean
    over: `tokens` of backward(), else the labels that the forward got, else those of the loader's
    batch.

    Attributes:
      engine: does the work.
      module: the model itself.
      loader: the given one, which knows its last batch; None: not given.
      last_result: StepResult of the last update, None before the first.
      applied: updates that changed the parameters, since this object was made.
    """

    room, takes_unmarked = "loop", False  # of plain_backward

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any] | None = None,
        schedulers: Sequence[Any] = (),
    ) -> None:
        self.engine = engine
        self.module = engine.model
        self.last_result: StepResult | None = None
        self._schedulers = list(schedulers)
        self._optimizer = HandedOver(optimizer, engine, self.step, self._drop_full_window)
        self.applied = 0
        self.loader = None if loader is None else MarkedLoader(loader, self._new_epoch)
        self._counts = ModelCall(engine.model)
        self._forward_count: Count = None
        self._syncs = True
        self._division_was_told = False
        self._widens = settings_of(engine.config)["precision"]["dtype"] != "fp32"
        plain_backward.watch(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with wrong_batch.explained(self.module, kwargs, room="loop"):
            outputs = self.engine(*args, **kwargs)
        if torch.is_grad_enabled() and labels_in(kwargs) is not None:
            self._forward_count = self._counts.count(kwargs)
        # A loss outside of the forward would else be computed in 16 bits.
        outputs = _widened(outputs) if self._widens else outputs
        plain_backward.mark(outputs, self)
        return outputs

    def __getattr__(self, name: str) -> Any:
        if name in ("module", "engine"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(whole_state.no_copy("a wrapped model", "model", "model.module"))

    def backward(self, loss: Any, tokens: Count = None) -> None:
        """Accumulates the gradient of a micro-batch. The same as loss.backward() of a loss that was computed
        from what a call of this object returned, which knows no `tokens`.

        Args:
          loss: the micro-batch's mean, not divided by the accumulation; or what poise.Loss allows.
          tokens: how many tokens (or samples) it is a mean over.
        """
        loss = as_loss(loss)
        if loss.count is None and loss.kind == "mean":
            loss.count = tokens if tokens is not None else self._count()
        self._forward_count = None
        self.engine.backward(loss)
        if self.loader is not None:
            self.loader.calls += 1
        self._syncs = self._closes()

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float | None = None, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clips the window's gradient to a global L2 norm: in place of torch's function of that name.

        Args:
          parameters: those of the model, all of them; or max_norm alone.
          max_norm: above 0.

        Returns the norm before; None where the window goes on, since its gradient is not whole yet.
        """
        if max_norm is None:
            parameters, max_norm = None, parameters
        if norm_type != 2:
            raise Error(
                f"[loop] clip_grad_norm_ with norm_type {norm_type}; poise clips the L2 norm"
            )
        self._check_all(parameters)
        if self.engine.micro_batches == 0:
            raise Error(
                "[loop] clip_grad_norm_() before backward(): there is no gradient yet, so that the update "
                "would not be clipped; call it between backward() and optimizer.step()"
            )
        if not self._syncs:
            return None
        return torch.tensor(self.engine.clip_grad_norm(float(max_norm)))

    def step(self) -> StepResult | None:
        """The update, where the window is full; else nothing. optimizer.step() calls it."""
        if not self._syncs:
            return None
        self._optimizer.before_update()
        self.last_result = self.engine.step(last=True)
        self.applied += self.last_result.applied
        self._optimizer.after_update(self.last_result)
        return self.last_result

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last one of its window: optimizer.step() then updates."""
        return self._syncs

    @property
    def step_was_applied(self) -> bool:
        """Whether the last optimizer.step() changed the parameters."""
        return self._syncs and self.last_result is not None and self.last_result.applied

    def schedules_step(self, seen: int) -> bool:
        """Whether a scheduler.step() acts that comes now, after another one when so many updates were applied: not
        in an open window, and not after an update that was skipped, unless it is the first one since an update, as
        that of a loop which steps once an epoch. Before the first update a schedule may be stepped ahead."""
        was_skipped = self.last_result is not None and not self.last_result.applied
        return self.applied > seen or (self._syncs and not was_skipped)

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.engine.accumulation

    @contextlib.contextmanager
    def accumulate(self, *_: Any) -> Iterator[None]:
        """Around one micro-batch, as in accelerate; sync_gradients is then known from its start on."""
        self._syncs = self._closes(more=1)
        yield

    @contextlib.contextmanager
    def no_sync(self, *_: Any) -> Iterator[None]:
        """Around micro-batches whose optimizer.step() shall do nothing, as torch's DDP has it."""
        yield
        self._syncs = False

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision of the run, for a forward that is not just a call of this object."""
        return self.engine.forward_scope()

    def train(self, mode: bool = True) -> WrappedModel:
        self.module.train(mode)
        return self

    def eval(self) -> WrappedModel:
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's, with whole tensors; all ranks."""
        return self.engine.state_dict()

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Into the model, on rank 0 for all; all ranks."""
        with self.engine.gathered(writer=0):
            return self.module.load_state_dict(state_dict, strict=strict)

    def save(
        self,
        directory: Any,
        *,
        name: str = "",
        user: Mapping[str, str] | None = None,
        total_limit: int = 0,
    ) -> str:
        """Saves model, optimizer, schedulers and generators as a folder that is whole or not there;
        between windows, all ranks. Arguments and result as in poise.Engine.save."""
        texts = loop_state.text(self._optimizer.optimizer, self._schedulers, self._counters())
        user = {**(user or {}), loop_state.KEY: texts}
        return self.engine.save(directory, name=name, user=user, total_limit=total_limit)

    def load(self, path: Any, *, weights_only: bool = False) -> Any:
        """Goes on from a save, or from the latest one in a directory of saves; all ranks."""
        loaded = self.engine.load(path, weights_only=weights_only)
        if not weights_only:
            saved = loaded.user.get(loop_state.KEY)
            self._take_counters(loop_state.take(saved, self._optimizer.optimizer, self._schedulers))
        return loaded

    save_state, load_state = save, load  # accelerate's names

    def _counters(self) -> dict[str, Any]:
        """What a subclass counts itself."""
        return {}

    def _take_counters(self, counters: Mapping[str, Any]) -> None: ...

    def _closes(self, more: int = 0) -> bool:
        """Whether the window is full, or the data at its end: also after so many more calls."""
        if self.engine.micro_batches + more >= self.engine.accumulation:
            return True
        loader = self.loader
        if loader is None or not loader.at_end:
            return False
        return loader.calls + more >= loader.usual_calls

    def _drop_full_window(self) -> None:
        """What zero_grad() is for between backward and step: an update that the loop does not want. Of an open
        window it drops nothing, since loops call it at each micro-batch."""
        if self.engine.micro_batches > 0 and self._closes():
            self.engine.discard_window()

    def _count(self) -> Count:
        if self._forward_count is not None:
            return self._forward_count
        batch = None if self.loader is None else self.loader.batch
        labels = labels_in(batch)
        if batch is None or labels is None or labels.is_floating_point() or labels.dim() == 0:
            return None if batch is None else self._counts.count(batch)
        return count_targets(labels)  # the loop's own loss: nothing is shifted inside the model

    def notice_division(self, loss: torch.Tensor) -> None:
        """Plain loops divide by the accumulation, which the engine does, by counts."""
        steps = self.engine.accumulation
        if steps > 1 and plain_backward.divisor_of(loss) == steps and not self._division_was_told:
            logger.warning(
                "[loop] the loss is divided by %d, as many micro-batches as a window has: the mean over the "
                "window is made by the update, so that gradients are %d times too small; leave the "
                "division out",
                steps,
                steps,
            )
            self._division_was_told = True

    def _new_epoch(self) -> None:
        """A pass that was left before its end leaves no part of a window behind."""
        self.engine.discard_window()

    def _check_all(self, parameters: Any) -> None:
        if parameters is None:
            return
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        ids = {id(p) for p in given}
        left_out = [
            n for n, p in self.module.named_parameters() if p.requires_grad and id(p) not in ids
        ]
        if left_out:
            raise Error(
                f"[loop] clip_grad_norm_ got {len(ids)} parameters, without {left_out[0]}; poise "
                "clips the norm over all that are trained: give model.parameters()"
            )


def _widened(outputs: Any) -> Any:
    return cast_inputs(outputs, torch.float32)
