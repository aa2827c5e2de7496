"""A model of Python as the planner's chain: traced without memory, or measured where it looks at values."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from poise import comm, fake_trace, model_view, separable, trace
from poise._batch import leaves_of, mapped
from poise._C import PlanLink, PlanTraced
from poise.fake_trace import Traced
from poise.inside_operators import Inside
from poise.planned_loss import PlannedLoss

logger = logging.getLogger("poise")

ALIGNMENT = 256  # elements that a parameter's place is a multiple of
PRECISIONS = {  # name: dtype of forward, of parameters
    "fp32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "bf16-autocast": ("bf16", "fp32"),
    "fp16": ("fp16", "fp16"),
    "fp16-autocast": ("fp16", "fp32"),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = (
    1,
    2,
)  # samples of traces that tell what operators take inside, where larger ones are too large


Runs = dict[tuple[int, bool], Traced]  # by samples, and whether all blocks are recomputed
Blocks = list[tuple[str, nn.Module]]
Made = TypeVar("Made")


def traced(
    loss: PlannedLoss,
    sample: Any,
    blocks: Blocks,
    precision: str,
    sizes: list[int],
    notes: list[str],
    *,
    away: bool = False,
    device: torch.device = fake_trace.CPU,
    inside: Inside | None = None,
) -> tuple[PlanTraced, str]:
    """The model at so many samples, and how it was traced; `away`: with its activations offloaded, too; `inside`:
    as in fake_trace.trace."""
    model = loss.model
    try:
        chain = by_fake_tensors(
            model, sample, loss, blocks, precision, sizes, away=away, device=device, inside=inside
        )
        return chain, "fake tensors"
    except fake_trace.Untraceable as error:
        notes.append(f"{error}; a copy of it was run on real samples instead")
        logger.warning("%s", notes[-1])
    runs = _measured(loss, sample, units_of(blocks), precision, sizes[:2])
    return _chain(model, blocks, sizes[:2], runs, {}), "a measured micro-batch"


def by_fake_tensors(
    model: nn.Module,
    sample: Any,
    loss_of: Callable[[Any], torch.Tensor],
    blocks: Blocks,
    precision: str,
    sizes: list[int],
    *,
    away: bool = False,
    device: torch.device = fake_trace.CPU,
    inside: Inside | None = None,
) -> PlanTraced:
    """The model at so many samples, without memory. Raises fake_trace.Untraceable.

    device: where model and loss believe to be; where they name another one, that of this machine.
    """
    forward, parameters = PRECISIONS[precision]
    dtype = DTYPES[parameters] if parameters != "fp32" else None
    autocast = DTYPES.get(forward)  # around 16-bit parameters, too

    def run(
        where: torch.device, size: int, *, recomputed: bool = False, away: bool = False
    ) -> Traced:
        if inside is not None:
            inside.begin((recomputed, away), size)
        return fake_trace.trace(
            model,
            loss_of,
            _resized(sample, size),
            blocks=blocks,
            recomputed=recomputed,
            dtype=dtype,
            autocast=autocast,
            away=away,
            device=where,
            inside=inside,
        )

    def chain_of(where: torch.device) -> PlanTraced:
        both = [(size, again) for size in sizes for again in (False, True)]
        runs = {(size, again): run(where, size, recomputed=again) for size, again in both}
        sent = {size: run(where, size, away=True) for size in sizes} if away else {}
        return _chain(model, blocks, sizes, runs, sent)

    def chain(where: torch.device) -> PlanTraced:
        made = chain_of(where)
        if inside is None or not inside.missed:
            return made
        with contextlib.suppress(fake_trace.Untraceable):  # too few samples for a norm over them
            for size in SMALL:
                for again in (False, True):
                    run(where, size, recomputed=again)
                if away:
                    run(where, size, away=True)
        return chain_of(where)

    try:
        return _there_or_elsewhere(chain, device)
    except fake_trace.Untraceable:
        if forward != "fp16":
            raise
    # Models of transformers look whether values are too large for fp16; bf16 holds as many bytes.
    precision = precision.replace("fp16", "bf16")
    return by_fake_tensors(
        model, sample, loss_of, blocks, precision, sizes, away=away, device=device, inside=inside
    )


def _there_or_elsewhere(run: Callable[[torch.device], Made], device: torch.device) -> Made:
    """On the device, or where model or loss name another one, there."""
    try:
        return run(device)
    except fake_trace.Untraceable as error:
        if torch.cuda.is_available():
            with contextlib.suppress(fake_trace.Untraceable):
                return run(_other(device))
        raise error


def _other(device: torch.device) -> torch.device:
    if device.type == "cuda":
        return fake_trace.CPU
    return torch.device("cuda", torch.cuda.current_device())


def _chain(
    model: nn.Module, blocks: Blocks, sizes: list[int], runs: Runs, sent: dict[int, Traced]
) -> PlanTraced:
    flats, rest, places = flats_of(model, blocks)
    names = runs[sizes[0], False].names

    def links(size: int) -> list[PlanLink]:
        kept, again, gone = runs[size, False], runs[size, True], sent.get(size)
        return [
            _link(kept, again, gone, i, places, is_block=len(names) > 1) for i in range(len(names))
        ]

    return PlanTraced(flats, rest, sizes, [links(size) for size in sizes])


def sizes_of(most: int, fixed: int | None) -> list[int]:
    """Micro-batches to trace: peaks bend where activations outgrow gradients of weights."""
    if fixed is not None:
        return [fixed]
    return sorted({size for size in (1, 2, 4, 16, 64) if size < most} | {most})


def precision_of(settings: Mapping[str, Any]) -> str:
    """The name in PRECISIONS of a configuration's section."""
    dtype = str(settings["dtype"])
    return dtype if settings["parameters"] == dtype else f"{dtype}-autocast"


def units_of(blocks: Blocks) -> list[str]:
    """Names of the blocks, as Engine's `units` takes them."""
    return [name for name, _ in blocks]


def _link(
    kept: Traced,
    again: Traced,
    sent: Traced | None,
    i: int,
    places: dict[str, int],
    *,
    is_block: bool,
) -> PlanLink:
    name = kept.names[i]
    inside = is_block and 0 < i < len(kept.names) - 1
    # A model seen as one link recomputes all of its blocks or none.
    block = inside or (not is_block and bool(places))
    return PlanLink(
        name,
        places.get(name, -1),
        block,
        _bytes(kept.links[i]),
        _bytes(again.links[i]),
        kept.flops[i],
        kept.moved[i],
        [] if sent is None else [_sent(sent, i), _input_sent((again if block else kept).links[i])],
    )


def _bytes(link: trace.Link) -> list[int]:
    return [link.saved, link.forward_peak, link.backward_peak]


def _sent(traced: Traced, i: int) -> list[int]:
    return [*_bytes(traced.links[i]), round(traced.sent[i])]


def _input_sent(link: trace.Link) -> list[int]:
    """Of a recomputed block, which saves its input: it leaves, and two more are on their way back."""
    return [0, link.forward_peak, link.backward_peak + 2 * link.saved, link.saved]


def flats_of(
    model: nn.Module, blocks: Blocks
) -> tuple[list[tuple[str, int, int, int]], int, dict[str, int]]:
    """(name, elements that train, frozen ones, rows and columns of those that train) of each block and
    of the rest; places by name."""
    seen: set[int] = set()
    flats: list[tuple[str, int, int, int]] = []
    places = {}

    def add(name: str, parameters: Any) -> None:
        sizes, factored = [0, 0], 0
        for parameter in parameters:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            sizes[not parameter.requires_grad] += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            factored += _factored(parameter) if parameter.requires_grad else 0
        flats.append((name, *sizes, factored))

    for name, module in blocks:
        places[name] = len(flats)
        add(name, module.parameters())
    add("rest", model.parameters())
    return flats, len(flats) - 1, places


def _factored(parameter: torch.Tensor) -> int:
    """Elements of factored moments: rows and columns of the last two dimensions."""
    if parameter.dim() < 2:
        return parameter.numel()
    rows, columns = parameter.shape[-2:]
    return parameter.numel() // max(1, columns) + parameter.numel() // max(1, rows)


def rows_of(sample: Any) -> int:
    """Of its first tensor. Raises Untraceable where it has none."""
    for leaf in leaves_of(sample):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise fake_trace.Untraceable(
        "[plan] the sample holds no tensor with samples; give a batch of the data"
    )


def _resized(sample: Any, size: int) -> Any:
    """As many samples, of the meta device: shapes and types alone."""
    rows = rows_of(sample)

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if shape and shape[0] == rows:
            shape[0] = size
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    return mapped(resize, sample)


def why_not_split(
    loss: PlannedLoss, sample: Any, given: bool | None, device: torch.device
) -> str | None:
    """As separable.why_not_split.

    Args:
      loss: is run without memory, or of a copy of its model, where nothing else tells.
      sample: a batch.
      given: what was said of the loss; None: nothing.
      device: where model and loss believe to be.
    """

    def came_counted() -> bool:
        batch = _resized(sample, rows_of(sample))

        def run(where: torch.device) -> None:
            fake_trace.trace(loss.model, loss, batch, blocks=[], recomputed=False, device=where)

        try:
            _there_or_elsewhere(run, device)
        except fake_trace.Untraceable:  # traced() says so
            copied = loss.of_copy()
            with torch.no_grad():
                copied(sample)
            return copied.came_counted
        return loss.came_counted

    return separable.why_not_split(
        loss.model, given, own_loss=loss.loss_fn is None, came_counted=came_counted
    )


def kept_micro_batch(mine: int, rows: int) -> int:
    """That of a sample of so many rows, or the largest below that divides what a rank has."""
    return max(n for n in range(1, min(rows, mine) + 1) if mine % n == 0)


def _measured(
    loss: PlannedLoss, sample: Any, units: list[str], precision: str, sizes: list[int]
) -> Runs:
    """Real micro-batches of a copy of the model, with all blocks recomputed and with none."""
    from poise import measured_fit
    from poise.engine import Engine

    loss_of = loss.of_copy()
    copied = loss_of.model
    dtype, parameters = PRECISIONS[precision]
    config = {"precision": {"dtype": dtype, "parameters": parameters}}
    alone = comm.one_rank(model_view.device_of(copied))  # whoever else trains: only one may plan
    engine = Engine(copied, config, units=units, group=alone)
    rows, found = rows_of(sample), {}
    names = ["the embedding", *units, "the head"]
    flops = 2.0 * sum(p.numel() for p in copied.parameters())
    for size in sizes:
        batch = mapped(
            lambda leaf, size=size: (
                leaf[[i % rows for i in range(size)]]
                if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
                else leaf
            ),
            sample,
        )
        for recomputed in (False, True):
            policy = {"policy": "first_m", "n": len(units)} if recomputed and units else None
            engine.set_checkpointing(policy or {"policy": "none"})
            found[size, recomputed] = trace.measure(engine, batch, lambda b: (loss_of(b), 1))
    runs = {}
    traces = measured_fit.alike(engine.group, list(found.values()))
    for (size, recomputed), one in zip(found, traces, strict=True):
        links = one.links
        shown = names if len(links) == len(names) else ["the model"]
        each, nothing = [size * flops / len(links)] * len(links), [0.0] * len(links)
        runs[size, recomputed] = Traced(shown, links, each, nothing, nothing)
    return runs
