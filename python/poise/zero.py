"""DeepSpeed's tools for models whose parameters are sharded: poise.zero.Init, GatheredParameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from poise._C import Error
from poise.engine import Engine, engine_of


@contextlib.contextmanager
def Init(
    module: nn.Module | None = None,
    data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: Any = None,
    config: Any = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: Any = None,
) -> Iterator[None]:
    """Around the making of a model: its parameters are made on the host, in `dtype`.

    The engine takes them from there unit by unit, rank 0's values for all. A model too large for
    one host is made under torch.device("meta") instead (poise.Engine's materialize).

    Args:
      dtype: of the parameters; None: torch's default.
      enabled: False: nothing.
      module: refused: the engine shards a model that is already made.
      data_parallel_group, mem_efficient_linear, remote_device, pin_memory, config_dict_or_path,
        config, mpu: accepted; they are the engine's to know.
    """
    if module is not None:
        raise Error("[zero] Init(module=...): give the model to poise.initialize, which shards it")
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def GatheredParameters(
    params: Any,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """While it lasts the parameters are whole, at every stage; all ranks enter it, between windows.

    Args:
      params: one or several parameters, or a module. The engine gathers all of its own.
      modifier_rank: the rank whose edits hold for all at the end; None: nothing is edited.
      fwd_module, enabled: accepted; enabled False: nothing.
    """
    engine = _engine_of(params) if enabled else None
    if engine is None:  # not sharded yet
        yield
        return
    with engine.gathered(writer=modifier_rank):
        yield


def _engine_of(params: Any) -> Engine | None:
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    if not isinstance(params, Iterable):
        raise Error(
            f"[zero] GatheredParameters got {type(params).__name__}; give parameters or a module"
        )
    return next(
        (engine for engine in map(engine_of, params) if engine is not None),
        None,
    )
