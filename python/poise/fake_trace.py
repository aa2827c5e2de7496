"""What forward and backward of a model hold and compute, traced with tensors that have no memory.

The model's parameters are replaced by fake ones while its loss runs; every storage that an operation
makes is counted until it is gone, block by block (poise.trace has the blocks' rules). Nothing is
allocated, and the model may be larger than the machine or on the meta device. What an operation takes
inside (a convolution's copies, a fused attention's scratch) is seen where it is asked for
(poise.inside_operators).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from poise import kept_attributes, model_view
from poise._batch import leaves_of, mapped
from poise._C import Error
from poise.fake_offload import Offload
from poise.inside_operators import Inside
from poise.trace import Link, Marks

LossOf = Callable[[Any], torch.Tensor]
CPU = torch.device("cpu")
BESIDE_LOSS = 12  # bytes of the engine's scalars: the loss with its weight, its gradient, its count


class Untraceable(Error):
    """The model cannot run without data."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """One micro-batch.

    Attributes:
      names: of the links: what comes before the blocks, each block, what comes after; one alone
        where the blocks did not run one after the other.
      links: their bytes.
      flops: of their forwards.
      moved: bytes that their forwards read and write.
      sent: bytes of what they save that leave, where activations are offloaded.
    """

    names: list[str]
    links: list[Link]
    flops: list[float]
    moved: list[float]
    sent: list[float]


def trace(
    model: nn.Module,
    loss_of: LossOf,
    batch: Any,
    *,
    blocks: list[tuple[str, nn.Module]],
    recomputed: bool,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    away: bool = False,
    device: torch.device = CPU,
    inside: Inside | None = None,
) -> Traced:
    """Traces one forward and backward.

    Args:
      model: any module; it is left as it was.
      loss_of: runs the model on a batch and gives the scalar loss.
      batch: tensors; their values are not looked at.
      blocks: names and modules of the model's blocks.
      recomputed: whether the blocks recompute their activations in backward.
      dtype: of floating parameters; None: their own.
      autocast: dtype of an autocast around forward; None: none.
      away: whether what forward saves lies elsewhere until backward (poise.fake_offload).
      device: that the tensors say they are on, for models that name it, and for the kernels that torch
        chooses there; one of this machine.
      inside: what operators take on this CPU beside their results; None: that is not counted.

    Raises:
      Untraceable: where the model looks at values, or an operation has no fake form.
    """
    modules = [module for _, module in blocks]
    again = modules if recomputed else []
    made = None
    if len(modules) > 1:
        made = _trace(model, loss_of, batch, modules, again, dtype, autocast, away, device, inside)
    if made is None:  # the blocks did not run one after the other
        modules = []
        made = _trace(model, loss_of, batch, [], again, dtype, autocast, away, device, inside)
    assert made is not None
    marks, counted = made
    names = (
        ["the embedding", *(name for name, _ in blocks), "the head"] if modules else ["the model"]
    )
    steps = list(zip(counted, counted[1:], strict=False))[: len(marks)]
    return Traced(
        names,
        marks,
        [after.flops - before.flops for before, after in steps],
        [after.moved - before.moved for before, after in steps],
        [after.sent - before.sent for before, after in steps],
    )


@dataclasses.dataclass(frozen=True)
class _Count:
    flops: float
    moved: float
    sent: float


def _trace(
    model: nn.Module,
    loss_of: LossOf,
    batch: Any,
    modules: list[nn.Module],
    again: list[nn.Module],
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
    away: bool,
    device: torch.device,
    inside: Inside | None,
) -> tuple[list[Link], list[_Count]] | None:
    whole = _Whole(model, loss_of, autocast, device)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counter = Counter(inside)
    try:
        # The modes of its modules too; and compiled code that met a mode of torch's would run uncompiled from then on.
        with kept_attributes.kept(model), torch.compiler.set_stance("force_eager"):
            model.train()
            with mode:
                state = {name: _fake(one, dtype, device) for name, one in whole.named_parameters()}
                state |= {name: _fake(one, None, device) for name, one in whole.named_buffers()}
                for tensor in state.values():
                    if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                        tensor.register_post_accumulate_grad_hook(_taken)
                inputs = mapped(lambda leaf: _fake(leaf, None, device), batch)
            for tensor in [*state.values(), *leaves_of(inputs)]:
                if isinstance(tensor, torch.Tensor):
                    counter.known(tensor)
            marks = Marks(counter, modules)
            with contextlib.ExitStack() as stack:
                stack.enter_context(_recomputing(again))
                if not (isinstance(batch, Mapping) and "position_ids" in batch):
                    stack.enter_context(_unpacked_positions())
                stack.enter_context(mode)
                stack.enter_context(counter)
                stack.enter_context(marks.hooks())
                if away:
                    counter.offload = Offload(counter.is_known)
                    stack.enter_context(counter.offload.hooks())
                torch.func.functional_call(whole, state, (inputs, marks))
    except Exception as error:
        raise Untraceable(
            f"[plan] {type(model).__name__} does not run without data: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    links = marks.links()
    return None if links is None else (links, counter.at_reads)


class _Whole(nn.Module):
    """Forward and backward as a module, so that its model's parameters are replaced in both."""

    def __init__(
        self,
        model: nn.Module,
        loss_of: LossOf,
        autocast: torch.dtype | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model, self._loss_of = model, loss_of
        self._autocast, self._device = autocast, device

    def forward(self, batch: Any, marks: Marks) -> None:
        enabled = self._autocast is not None
        marks.start()
        beside = torch.empty(BESIDE_LOSS, dtype=torch.uint8, device=self._device)
        with torch.autocast(
            self._device.type, self._autocast, enabled=enabled, cache_enabled=False
        ):
            loss = self._loss_of(batch)
        marks.end_forward()
        loss.backward()
        del loss, beside
        marks.end_backward()


def _fake(leaf: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    kept = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=kept, device=device)
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(made, requires_grad=leaf.requires_grad)
    return made


def _taken(parameter: torch.Tensor) -> None:
    """As in the engine, where a gradient goes into its accumulator as it is made."""
    parameter.grad = None


@contextlib.contextmanager
def _recomputing(modules: list[nn.Module]) -> Iterator[None]:
    kept = [module.__dict__.get("forward") for module in modules]

    def again(forward: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        return run

    for module in modules:
        module.forward = again(module.forward)
    try:
        yield
    finally:
        for module, own in zip(modules, kept, strict=True):
            del module.__dict__["forward"]
            if own is not None:
                module.forward = own


@contextlib.contextmanager
def _unpacked_positions() -> Iterator[None]:
    """transformers looks at values for samples packed into one row, and without them assumes some.

    Positions that it counts by itself are never packed.
    """
    masks = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = find


class Counter(TorchDispatchMode):
    """Bytes of living storages, FLOPs, and bytes read and written; a meter for poise.trace.Marks."""

    def __init__(self, inside: Inside | None = None) -> None:
        super().__init__()
        self._inside = inside
        self._known, self._before = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._now = self._peak = 0
        self._flops = self._moved = 0.0
        self.offload: Offload | None = None
        self.at_reads: list[_Count] = []

    def known(self, tensor: torch.Tensor) -> None:
        """It was there before: not counted."""
        self._known[tensor.untyped_storage()] = True
        self._before[tensor.untyped_storage()] = True

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether it was there before: parameters, buffers and inputs stay."""
        return tensor.untyped_storage() in self._before

    def read(self) -> tuple[int, int]:
        now, peak = self._now, self._peak
        self._peak = now
        sent = self.offload.sent if self.offload is not None else 0
        self.at_reads.append(_Count(self._flops, self._moved, sent))
        return now, peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default:
            out = _grouped_product(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        packet = getattr(func, "_overloadpacket", None)
        flops = self._flops
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self._flops += _attention_flops(args[0], args[1])
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self._flops += 2.5 * _attention_flops(args[1], args[2])
        elif packet in flop_registry:
            self._flops += flop_registry[packet](*args, **kwargs, out_val=out)
        within: tuple[int, ...] = ()
        if self._inside is not None:
            within = self._inside.of(func, args, kwargs, outputs, self._flops - flops)
        if not within and packet is torch.ops.aten.convolution_backward:
            # Copies in the layout of the kernels: not made where tensors have no memory.
            within = (_bytes(args[0]) + _bytes(args[1]),)
        made = 0
        beyond = itertools.chain(within[1:], itertools.repeat(0))
        for tensor in outputs:
            made += self._count(tensor, next(beyond))
        self._peak = max(self._peak, self._now + sum(within[:1]))
        if made or not getattr(func, "is_view", False):
            inputs = [
                leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)
            ]
            self._moved += sum(_bytes(tensor) for tensor in (*inputs, *outputs))
        return out

    def _count(self, tensor: torch.Tensor, beyond: int) -> int:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return 0
        self._known[storage] = True
        size = storage.nbytes() + beyond  # than its shape takes
        self._now += size
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._free, size)
        return size

    def _free(self, size: int) -> None:
        self._now -= size


def _grouped_product(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """Without memory it knows bf16 alone, which on a CPU is one type of several."""
    dtype = args[0].dtype
    known = func(*(one.to(torch.bfloat16) for one in args[:2]), *args[2:], **kwargs)
    return torch.empty_strided(known.shape, known.stride(), dtype=dtype, device=known.device)


def _attention_flops(query: torch.Tensor, key: torch.Tensor) -> float:
    """Of scores and of their product with the values, in full."""
    rows, heads, length, width = query.shape
    return 4.0 * rows * heads * length * key.shape[2] * width


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def blocks_of(model: nn.Module, units: model_view.UnitChoice = None) -> list[tuple[str, nn.Module]]:
    """The blocks that may be recomputed, by name."""
    return model_view.find_units(model, units)
