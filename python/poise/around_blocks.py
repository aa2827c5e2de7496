"""What an engine puts around the modules of its model: from the inside out recomputation, activations that leave
the device, and the units of parameters that are sharded."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from poise import _offloaded, _recurrent, _units, checkpointing, model_view
from poise._C import Error
from poise.config import settings_of

if TYPE_CHECKING:
    from poise.engine import Engine


def attach(engine: Engine, undo: contextlib.ExitStack) -> None:
    """As its configuration and its checkpointing say; `undo` takes all of it away again."""
    _recurrent.keep_in_place(engine.model, undo)
    _recompute(engine, undo)
    _offload_activations(engine, undo)
    _shard(engine, undo)


def _recompute(engine: Engine, undo: contextlib.ExitStack) -> None:
    policy = engine.checkpointing
    if policy["policy"] == "none":
        return
    if model_view.is_compiled(engine.model):
        raise Error(
            f"[engine] checkpointing {policy['policy']} around blocks of a model compiled as a "
            "whole would be traced through and lost; compile the blocks instead, or set "
            "checkpointing to none"
        )
    names = policy["units"] or [name for name, _ in engine.blocks] or None
    handle = checkpointing.apply(engine.model, policy["policy"], policy["n"], names)
    undo.callback(handle.remove)


def _offload_activations(engine: Engine, undo: contextlib.ExitStack) -> None:
    """Of the modules that offload.activation_units names; around what recomputes them."""
    chosen = settings_of(engine.config)["offload"]["activation_units"]
    if not chosen:
        return
    modules = checkpointing.named_units(engine.model, chosen)
    for forward in _offloaded.attach(list(modules.values()), engine._engine.activation_scope()):
        undo.callback(forward.remove)


def _shard(engine: Engine, undo: contextlib.ExitStack) -> None:
    """Runs the blocks as units; outermost, so that a block's recompute stays inside its unit."""
    if not engine.shards_parameters():
        return
    known = set(engine.units)
    modules = [
        (module, engine._engine.unit(name)) for name, module in engine.blocks if name in known
    ]
    for forward in _units.attach(modules):
        undo.callback(forward.remove)
    owner = weakref.ref(engine)

    def refuses() -> bool:
        alive = owner()
        return alive is not None and not alive._whole

    refusal = _units.Refusal(refuses)
    for module in engine.model.modules():
        undo.callback(module.register_state_dict_pre_hook(refusal).remove)
