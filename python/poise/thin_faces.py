"""Four small classes over one engine, each with one concern: the window, precision, recomputation,
sharding. They add nothing to what the engine does; they are other names for it.

system = poise.GradientAccumulationSystem({"micro_batch_size": 2, "accumulation_steps": 8, "dtype": "bf16"})
system.over(model)
loss = system.core_operation(iter(loader))
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from poise import checkpointing
from poise._C import Error, StepResult
from poise.engine import Engine
from poise.loss import Count, Loss
from poise.model_call import ModelCall

DTYPES = {
    "fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AccumulationConfig:
    """Of a GradientAccumulationSystem.

    Attributes:
      micro_batch_size: samples of a micro-batch, as the iterator gives them.
      accumulation_steps: micro-batches of a window.
      gradient_checkpointing: whether blocks are recomputed in backward.
      checkpoint_interval: every so many of them.
      dtype: of the forward: fp32, bf16 or fp16.
      loss_scale: fp16: a fixed one; None: dynamic.
      zero_stage: what is sharded over ranks, 0 to 3.
      offload_config: what is kept on the host; refused where the engine cannot.
    """

    micro_batch_size: int = 1
    accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    dtype: Any = "fp32"
    loss_scale: float | None = None
    checkpoint_interval: int = 1
    zero_stage: int = 0
    offload_config: Mapping[str, Any] | None = None

    def settings(self) -> dict[str, Any]:
        """The engine's."""
        recompute = {"policy": "every_n", "n": self.checkpoint_interval}
        return {
            "batch": {
                "micro_batch_size": self.micro_batch_size,
                "accumulation": self.accumulation_steps,
            },
            "precision": _precision(self.dtype, self.loss_scale),
            "checkpointing": recompute if self.gradient_checkpointing else {"policy": "none"},
            "zero": {"stage": self.zero_stage},
            **_offload(self.offload_config),
        }


class _OverEngine:
    """What the classes share: an engine that over() makes."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def _settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def over(self, model: nn.Module, settings: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Makes the engine of a model.

        Args:
          settings: further sections of the engine's settings (optimizer, schedule, ...).
          more: arguments of poise.Engine.
        """
        self._engine = Engine(model, {**self._settings(), **(settings or {})}, **more)
        return self

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise Error(f"[engine] {type(self).__name__} has no model yet; call over(model) first")
        return self._engine


class GradientAccumulationSystem(_OverEngine):
    """Windows of micro-batches.

    Args:
      config: AccumulationConfig, or a dictionary of its fields.
    """

    def __init__(self, config: AccumulationConfig | Mapping[str, Any]) -> None:
        super().__init__()
        if isinstance(config, Mapping):
            known = {field.name for field in dataclasses.fields(AccumulationConfig)}
            unknown = [name for name in config if name not in known]
            if unknown:
                raise Error(
                    f"[engine] GradientAccumulationSystem has no {unknown[0]}; it knows "
                    f"{', '.join(sorted(known))}"
                )
            config = AccumulationConfig(**config)
        if config.accumulation_steps < 1:
            raise Error(
                f"[engine] accumulation_steps is {config.accumulation_steps}; a window has 1 "
                "micro-batch or more"
            )
        self.config = config
        self.last_result: StepResult | None = None

    def _settings(self) -> dict[str, Any]:
        return self.config.settings()

    def core_operation(
        self, data_iterator: Iterator[Any], loss_fn: Callable[[Any], Any] | None = None
    ) -> float:
        """One update; the mean loss over the tokens (or samples) of its window.

        Args:
          data_iterator: gives micro-batches; where fewer are left than a window has, the window is
            short. Without any StopIteration is raised.
          loss_fn: as in poise.Engine.step; None: the model returns its loss.
        """
        window = list(itertools.islice(data_iterator, self.config.accumulation_steps))
        if not window:
            raise StopIteration
        loss_fn = loss_fn or ModelCall(self.engine.model)
        self.last_result = self.engine.step(window, loss_fn)
        return self.last_result.loss


class MixedPrecisionTrainer(_OverEngine):
    """Forward in 16 bits, fp32 masters, a loss scale in fp16.

    Args:
      dtype: bf16, fp16 or fp32, or torch's.
      loss_scale: fp16: a fixed one; None: dynamic.
    """

    def __init__(self, dtype: Any = "bf16", loss_scale: float | None = None) -> None:
        super().__init__()
        self._precision = _precision(dtype, loss_scale)

    def _settings(self) -> dict[str, Any]:
        return {"precision": self._precision, "optimizer": {"max_grad_norm": 0.0}}

    def autocast(self) -> contextlib.AbstractContextManager:
        """Around the forward."""
        return self.engine.forward_scope()

    def backward(self, loss: torch.Tensor | Loss, tokens: Count = None) -> None:
        """Scaled, accumulated in fp32."""
        self.engine.backward(loss, tokens)

    def clip_grad_norm(self, max_norm: float) -> float:
        """The norm before; the gradient is unscaled first."""
        return self.engine.clip_grad_norm(max_norm)

    def update_scale(self) -> StepResult:
        """The update, unless a gradient overflowed, and then the next loss scale."""
        return self.engine.step(last=True)

    @property
    def loss_scale(self) -> float:
        return self.engine.loss_scale


class ActivationCheckpoint:
    """Blocks are recomputed in backward instead of kept.

    Args:
      checkpoint_every_n: every so many blocks.
    """

    def __init__(self, checkpoint_every_n: int = 1) -> None:
        if checkpoint_every_n < 1:
            raise Error(
                f"[checkpointing] checkpoint_every_n is {checkpoint_every_n}; give 1 or more"
            )
        self._n = checkpoint_every_n
        self._handle: checkpointing.Handle | None = None

    @property
    def enabled(self) -> bool:
        return self._handle is not None

    def enable_if_needed(
        self, model: nn.Module, needed_bytes: int = 0, budget_bytes: int = 0
    ) -> bool:
        """Turns it on for the model's blocks, unless what is needed is known to fit the budget.

        Args:
          needed_bytes, budget_bytes: peak without recomputation, and what there is; 0: not known.
        """
        fits = 0 < needed_bytes <= budget_bytes
        if self._handle is None and not fits:
            self._handle = checkpointing.apply(model, "every_n", self._n)
        return self.enabled

    def disable(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def recompute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs), whose inside is computed again in backward."""
        return checkpointing.recompute(function, *args, **kwargs)


class ZeROOptimizer(_OverEngine):
    """An optimizer whose states (stage 1), gradients (2) and parameters (3) are sharded over ranks.

    Args:
      stage: 0 to 3.
      offload_config: what is kept on the host; refused where the engine cannot.
    """

    def __init__(self, stage: int = 0, offload_config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._sections = {"zero": {"stage": stage}, **_offload(offload_config)}

    def _settings(self) -> dict[str, Any]:
        return self._sections

    def zero_grad(self) -> None:
        """Drops what the open window has accumulated; after an update there is nothing to zero."""
        self.engine.discard_window()

    def reduce_scatter_gradients(self) -> None:
        """The window's sums over all ranks, each rank's part with it; step() does it otherwise."""
        self.engine.begin_update()

    def gather_parameters(self) -> contextlib.AbstractContextManager:
        """While it lasts all parameters are whole."""
        return self.engine.gathered()

    def step(self) -> StepResult:
        return self.engine.step(last=True)


def _precision(dtype: Any, loss_scale: float | None) -> dict[str, Any]:
    name = str(dtype).replace("torch.", "")
    if name not in DTYPES:
        raise Error(f"[precision] dtype is {name}; use fp32, bf16 or fp16")
    precision: dict[str, Any] = {"dtype": DTYPES[name]}
    if loss_scale is not None:
        if DTYPES[name] != "fp16":
            raise Error(f"[precision] loss_scale with {name}, which needs none; leave it out")
        precision["loss_scale"] = float(loss_scale)
    return precision


def _offload(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The offload section; the engine says which keys it knows."""
    return {"offload": dict(config)} if config else {}
