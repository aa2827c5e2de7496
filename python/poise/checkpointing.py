"""Recomputing activations: the same outputs and gradients with less kept until backward.

``apply`` turns it on for parts of any ``nn.Module``; ``recompute`` runs one call that way.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from poise import _C, model_view
from poise._C import Error, recomputing

logger = logging.getLogger("poise")

__all__ = ["Handle", "apply", "chunked_cross_entropy", "recompute", "recomputing"]


def recompute(
    fn: Callable[..., Any],
    *args: Any,
    buffers: Iterable[torch.Tensor] = (),
    generators: Iterable[torch.Generator] = (),
    **kwargs: Any,
) -> Any:
    """Calls ``fn(*args, **kwargs)`` now and again in backward, keeping only its inputs.

    Random state, autocast and grad mode are replayed. Inputs and outputs may be nested in any way that
    ``torch.utils._pytree`` knows.

    Args:
        fn: Must do the same both times; ``recomputing()`` tells it which run it is in.
        buffers: Tensors that ``fn`` updates in place (running statistics); the second run leaves them
            as it found them.
        generators: Of your own that ``fn`` draws from, beside torch's default ones. Those among its
            arguments, and those that it or modules around it hold (as attributes, in its closure), are
            found.
    """
    return _recompute(fn, args, kwargs, list(buffers), list(generators))


def _recompute(
    fn: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    buffers: list[torch.Tensor],
    generators: Iterable[torch.Generator] = (),
) -> Any:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    own = _states(_generators(fn, leaves, generators))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None  # the core keeps inputs, and lets an enclosing region drop them

    def again(tensors: list[torch.Tensor]) -> None:
        values = list(leaves)
        for i, tensor in zip(places, tensors, strict=False):
            values[i] = tensor
        again_args, again_kwargs = tree_unflatten(values, spec)
        with _replayed(own):
            fn(*again_args, **again_kwargs)

    return _C.recompute(lambda: fn(*args, **kwargs), again, inputs, buffers)


def _generators(
    fn: Callable[..., Any], leaves: Iterable[Any], given: Iterable[torch.Generator]
) -> list[torch.Generator]:
    """Of the user's own that a call may draw from: given, among its arguments, in what `fn` is of or closes over."""
    owner = getattr(fn, "__self__", fn)
    near = [owner.module if isinstance(owner, _Recomputed) else owner, *_closed_over(fn)]
    modules = {m for one in near if isinstance(one, nn.Module) for m in one.modules()}
    held = (value for module in modules for value in vars(module).values())
    found = [v for v in (*given, *leaves, *near, *held) if isinstance(v, torch.Generator)]
    return list({id(one): one for one in found}.values())


def _closed_over(fn: Callable[..., Any]) -> list[Any]:
    values = []
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # nothing in it yet
            values.append(cell.cell_contents)
    return values


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk_tokens: int = 1024,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of cross-entropy of ``hidden @ weight.T + bias`` without ever holding all logits.

    Args:
        hidden: ``[..., width]``; ``targets`` has the same leading sizes.
        weight: ``[classes, width]``; ``bias`` is ``[classes]`` or None.
        chunk_tokens: Rows whose logits exist at a time.
        ignore_index: Rows with this target count 0.

    Returns:
        The sum (fp32) and the number of counted rows (int64), both 0-dimensional.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _C.chunked_cross_entropy(
        rows, weight, bias, targets.reshape(-1), chunk_tokens, ignore_index
    )


class Handle:
    """What ``apply`` did to a model; ``remove()`` undoes it."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self.units = list(modules)  # names of the recomputed modules

    def remove(self) -> None:
        """Gives every module its own forward back. A second call does nothing."""
        for module in self._modules.values():
            for place in PLACES:
                recomputed = module.__dict__.get(place)
                if not isinstance(recomputed, _Recomputed):
                    continue
                del module.__dict__[place]
                if recomputed.own is not None:
                    setattr(module, place, recomputed.own)
        self._modules = {}


def apply(
    model: nn.Module,
    policy: str = "every_n",
    n: int = 1,
    units: str | type | Sequence[str | type] | None = None,
) -> Handle:
    """Lets parts of ``model`` recompute their activations in backward.

    Args:
        policy: Which of the units: ``every_n``, ``sqrt``, ``first_m``, ``list`` (all that ``units``
            names), ``selective`` (all, but outputs of matrix products and attention are kept), ``none``.
        n: For ``every_n`` and ``first_m``.
        units: Class names, classes, or shell patterns of module names. None finds the blocks: the
            entries of the ModuleList or Sequential of equal modules that holds most parameters.

    Compiled modules are recomputed as compiled; compile them before, not afterwards, which would run
    them uncompiled and is warned of. Names in ``state_dict`` stay. Call ``remove()`` on the result before pickling the model.
    """
    chosen = select(model, policy, n, units)
    for name, module in chosen.items():
        if any(isinstance(module.__dict__.get(place), _Recomputed) for place in PLACES):
            raise Error(
                f"[checkpointing] module is recomputed already: {name}; remove() that first"
            )
    warned: set[str] = set()
    for module in chosen.values():
        setattr(module, _place(module), _Recomputed(module, policy == "selective", warned))
    return Handle(chosen)


def select(
    model: nn.Module,
    policy: str = "every_n",
    n: int = 1,
    units: str | type | Sequence[str | type] | None = None,
) -> dict[str, nn.Module]:
    """The modules that ``apply`` with these arguments is for, by name."""
    if policy == "list" and units is None:
        raise Error("[checkpointing] policy 'list' without units; name some")
    blocks = _repeated_blocks(model) if units is None else named_units(model, units)
    names = list(blocks)
    flags = _C.recomputed_units(policy, n, names if policy == "list" else [], names)
    return {name: blocks[name] for name, flag in zip(names, flags, strict=True) if flag}


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    blocks = model_view.find_units(model)
    if not blocks or not model_view.is_uniform(module for _, module in blocks):
        raise Error(
            "[checkpointing] the model has no ModuleList or Sequential of equal blocks; "
            "name the modules with units="
        )
    return dict(blocks)


def named_units(
    model: nn.Module, wanted: str | type | Sequence[str | type]
) -> dict[str, nn.Module]:
    """Modules by class name, class, or shell pattern of their names; Error where one matches none."""
    names = []
    found = dict(model.named_modules())
    for entry in [wanted] if isinstance(wanted, (str, type)) else wanted:
        matches = [name for name, module in found.items() if _matches(entry, name, module)]
        if not matches:
            known = ", ".join(sorted({type(module).__name__ for module in found.values()}))
            raise Error(
                f"[checkpointing] no module has the class or name {entry}; the classes are: {known}"
            )
        names += [name for name in matches if name not in names]
    return {name: module for name, module in found.items() if name in names}


def _matches(entry: str | type, name: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    return type(module).__name__ == entry or bool(name and fnmatch.fnmatchcase(name, entry))


# What a module's call goes through: compiled in place (module.compile()) it is not forward.
PLACES = ("_compiled_call_impl", "forward")


def _place(module: nn.Module) -> str:
    return next(p for p in PLACES if p == "forward" or getattr(module, p, None) is not None)


class _Recomputed:
    """Stands in for a module's forward. Copied with the module, it belongs to the copy.

    Args:
      warned: classes of blocks that were warned of; all blocks of an apply() have the same one.
    """

    def __init__(self, module: nn.Module, selective: bool, warned: set[str]) -> None:
        self.module = module
        self.selective = selective
        self._warned = warned
        self.own = module.__dict__.get(_place(module))  # None: the class's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self._warn_of_compiling()
        return self._run(*args, **kwargs)

    # A compiler around it would move what is saved out of the region.
    @torch.compiler.disable
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        run = _recompute_selectively if self.selective else _recompute
        return run(self._forward, args, kwargs, self._statistics())

    @torch.compiler.disable
    def _warn_of_compiling(self) -> None:
        kind = type(self.module).__name__
        if kind in self._warned:
            return
        self._warned.add(kind)
        logger.warning(
            "[checkpointing] recomputed blocks (%s) run uncompiled inside what was compiled around them; "
            "compile the blocks themselves, before their engine is made (said once)",
            kind,
        )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _statistics(self) -> list[torch.Tensor]:
        norm = nn.modules.batchnorm._NormBase  # batch norms and instance norms
        return [b for m in self.module.modules() if isinstance(m, norm) for b in m.buffers(False)]


def _recompute_selectively(
    fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], buffers: list[torch.Tensor]
) -> Any:
    # Torch's dispatch modes decide by operator, which saved-tensor hooks cannot.
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def contexts() -> tuple[Any, Any]:
        first, second = create_selective_checkpoint_contexts(_kept_operators())
        return first, _both(_unchanged(buffers), _both(_replayed(own), second))

    own = _states(_generators(fn, tree_flatten((args, kwargs))[0], ()))
    call = functools.partial(fn, **kwargs)  # the module's keywords, not checkpoint's
    return checkpoint(call, *args, use_reentrant=False, context_fn=contexts)


@contextmanager
def _both(outer: Any, inner: Any) -> Any:
    with outer, inner:
        yield


@contextmanager
def _unchanged(buffers: list[torch.Tensor]) -> Any:
    values = [b.clone() for b in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, values, strict=False):
            buffer.data.copy_(value)


States = list[tuple[torch.Generator, torch.Tensor]]


def _states(generators: Iterable[torch.Generator]) -> States:
    return [(generator, generator.get_state()) for generator in generators]


@contextmanager
def _replayed(states: States) -> Any:
    """Generators of the user's own as they were before the first run; the default ones are replayed by the core,
    and by torch's checkpoint."""
    now = _states(generator for generator, _ in states)
    try:
        _set(states)
        yield
    finally:
        _set(now)


def _set(states: States) -> None:
    for generator, state in states:
        generator.set_state(state)


def _kept_operators() -> list[Any]:
    aten = torch.ops.aten
    return [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]
