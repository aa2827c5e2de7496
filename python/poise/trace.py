"""What forward and backward hold, block by block: measured in one small real run of the engine.

A model is seen as a chain of links: what comes before its blocks, each block, what comes after. A
link's figures do not count what the links before it keep, so that links of several runs (recomputed
or not) can be put together (poise.balance).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from poise import model_view
from poise._C import WindowDropped
from poise.engine import Engine
from poise.kept_attributes import Counted


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes of one link of the chain, beyond what is kept by the links before it.

    Attributes:
      saved: from the end of its forward to its backward, its output included.
      forward_peak: highest during its forward.
      backward_peak: highest during its backward, a second forward included.
    """

    saved: int
    forward_peak: int
    backward_peak: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """One micro-batch through forward and backward.

    Attributes:
      links: before the blocks, each block, after them; a single one where the blocks did not run
        one after the other, each once.
      seconds: of forward and backward.
      held: bytes by account between updates.
    """

    links: list[Link]
    seconds: float
    held: dict[str, int]


def joined(links: list[Link]) -> Link:
    """A chain as one link."""
    kept = forward = backward = 0
    for link in links:
        forward = max(forward, kept + link.forward_peak)
        kept += link.saved
    saved = kept
    for link in reversed(links):
        kept -= link.saved
        backward = max(backward, kept + link.backward_peak)
    return Link(saved, forward, backward)


def measure(engine: Engine, batch: Any, loss_fn: Callable[[Any], Any]) -> Trace:
    """Runs one micro-batch and drops its gradients: parameters, buffers and random state stay.

    All ranks. Raises torch.OutOfMemoryError where it does not fit, on all ranks where it does not on
    one; the engine stays usable.
    """
    blocks = [module for _, module in engine.blocks]
    if len(blocks) < 2 or model_view.is_compiled(engine.model):
        blocks = []
    return _run(engine, blocks, batch, loss_fn)


def held_besides(engine: Engine) -> int:
    """Bytes on a GPU that the engine's ledger does not count and its budget does, being the process's:
    another model, data. 0 on the CPU, where the budget is the ledger's."""
    device = model_view.device_of(engine.model)
    if device.type != "cuda":
        return 0
    return max(0, torch.cuda.memory_allocated(device) - int(engine.memory()["current_bytes"]))


def untold(device: torch.device) -> str:
    """The name of a GPU's allocator that tells nothing of what it gives out, so that all traces hold 0
    bytes; empty: it is torch's own, or the device a CPU."""
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_allocator_backend()
    return "" if name == "native" else name


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Random states, buffers and numbers of modules are at the end what they were at the beginning."""
    counted = Counted(model)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            counted.put_back()


def _run(
    engine: Engine, blocks: list[nn.Module], batch: Any, loss_fn: Callable[[Any], Any]
) -> Trace:
    device = model_view.device_of(engine.model)
    meter = _Meter(engine, device)
    held = {name: int(count) for name, count in engine.memory()["current"].items()}
    with unchanged(engine.model, device):
        marks = Marks(meter, blocks)
        lost, why = engine.lost_windows, None
        try:
            seconds = _forward_and_backward(engine, batch, loss_fn, meter, marks)
            with contextlib.suppress(WindowDropped):
                engine.drop_window()  # all ranks hear of memory that ran out on one
        except torch.OutOfMemoryError as error:
            why = str(error)
        except BaseException:
            engine.discard_window()
            raise
        if why is not None:  # out here what the failed forward's frames held is gone
            if engine.lost_windows == lost:
                engine.lose_window(why)
            raise torch.OutOfMemoryError(why)
    return Trace(marks.links() or [marks.whole()], seconds, held)


def _forward_and_backward(
    engine: Engine, batch: Any, loss_fn: Callable[[Any], Any], meter: _Meter, marks: Marks
) -> float:
    """The seconds that it took."""
    with marks.hooks():
        begin = meter.clock()
        marks.start()
        with engine.forward_scope():
            loss = loss_fn(batch)
        marks.end_forward()
        engine.backward(loss)
        marks.end_backward()
        return meter.clock() - begin


class _Meter:
    """Bytes that the engine's ledger counts, and their peak."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self._device = engine, device

    def read(self) -> tuple[int, int]:
        """(held now, peak since the last read)."""
        memory = self._engine.memory()
        self._engine.restart_peak()
        return memory["current_bytes"], memory["peak_bytes"]

    def clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Marks:
    """Reads a meter (bytes now, highest since the last read) where one link ends and the next begins."""

    def __init__(self, meter: Any, blocks: list[nn.Module]) -> None:
        self._meter, self._blocks = meter, blocks
        self._kept: list[int] = []  # held when the link's forward began
        self._forward: list[int] = []  # peaks
        self._backward: dict[int, int] = {}
        self._link = 0  # whose backward runs
        self._in_order = True

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for i, block in enumerate(self._blocks):
                stack.callback(block.register_forward_pre_hook(self._enter(i)).remove)
                stack.callback(block.register_forward_hook(self._leave(i)).remove)
            yield

    def start(self) -> None:
        now, _ = self._meter.read()
        self._kept.append(now)

    def end_forward(self) -> None:
        self._in_order &= len(self._kept) == (len(self._blocks) + 2 if self._blocks else 1)
        self._next()
        self._link = len(self._forward) - 1

    def end_backward(self) -> None:
        self._close()

    def links(self) -> list[Link] | None:
        """None where the blocks did not run one after the other."""
        if not self._in_order:
            return None
        links = []
        for i, peak in enumerate(self._forward):
            kept = self._kept[i]
            links.append(
                Link(
                    saved=self._kept[i + 1] - kept,
                    forward_peak=peak - kept,
                    backward_peak=self._backward.get(i, kept) - kept,
                )
            )
        return links

    def whole(self) -> Link:
        """All as one link: every read is a part of it."""
        begin = self._kept[0]
        return Link(
            saved=self._kept[-1] - begin,
            forward_peak=max(self._forward) - begin,
            backward_peak=max(self._backward.values()) - begin,
        )

    def _next(self) -> None:
        now, peak = self._meter.read()
        self._forward.append(peak)
        self._kept.append(now)

    def _close(self) -> None:
        _, peak = self._meter.read()
        self._backward[self._link] = max(peak, self._backward.get(self._link, 0))

    def _enter(self, i: int) -> Callable:
        def enter(module: nn.Module, arguments: Any) -> None:
            if not torch.is_grad_enabled() or len(self._kept) != i + 1:
                self._in_order = False
                return
            self._next()
            if i == 0:
                self._watch(arguments, 0)

        return enter

    def _leave(self, i: int) -> Callable:
        def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
            if not self._in_order:
                return
            if i == len(self._blocks) - 1:
                self._next()
            self._watch(outputs, i + 1)

        return leave

    def _watch(self, values: Any, link: int) -> None:
        """When their gradient is there the backward of the links after `link` has ended."""

        def begin(gradient: torch.Tensor) -> None:
            self._close()
            self._link = link

        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(begin)
                return
