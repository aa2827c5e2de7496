"""What a run is going to do, in numbers, before it does it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from poise._C import Group
from poise.run_length import RunLength
from poise.training_arguments import TrainingArguments

logger = logging.getLogger("poise")


def banner(
    model: nn.Module,
    args: TrainingArguments,
    run: RunLength,
    settings: dict[str, Any],
    examples: int | None,
    group: Group,
) -> list[str]:
    """The lines; `settings` are the engine's."""
    micro, accumulation = args.per_device_train_batch_size, args.accumulation
    optimizer, policy = settings["optimizer"]["type"], settings["checkpointing"]["policy"]
    return [
        f"poise trains {type(getattr(model, '_orig_mod', model)).__name__} on {args.device}",
        f"  micro-batch {micro} x accumulation {accumulation} x ranks {group.size} "
        f"= global batch {micro * accumulation * group.size}{_ramp(args)}",
        f"  {_data(run, examples)}",
        f"  {parameters(model)}; {precision(settings['precision'])}",
        f"  {optimizer}, learning rate {args.learning_rate:g}, {args.lr_scheduler_type}",
        f"  recomputed blocks: {policy}; memory budget: {_budget(args)}",
        *_sharding(settings["zero"], group),
        *offloading(settings.get("offload", {})),
    ]


SHARDED = (
    "nothing is sharded",
    "optimizer states are sharded",
    "optimizer states and gradients are sharded",
    "optimizer states, gradients and parameters are sharded",
)


def _ramp(args: TrainingArguments) -> str:
    if args.accumulation_ramp_updates == 0:
        return ""
    return (
        f", from accumulation {args.accumulation_ramp_from} on over "
        f"{args.accumulation_ramp_updates:,} updates"
    )


def _sharding(zero: dict[str, Any], group: Group) -> list[str]:
    """One line for several ranks, none for one."""
    if group.size == 1:
        return []
    stage, size = zero["stage"], zero["shard_group_size"]
    groups = f" in groups of {size}" if size > 0 else ""
    line = (
        f"  {group.size} ranks over {group.backend}, ZeRO stage {stage}: {SHARDED[stage]}{groups}"
    )
    return [line]


def offloading(policy: dict[str, Any]) -> list[str]:
    """One line for what lives away from the device, none where nothing does."""
    share = f"{100 * policy.get('optimizer_fraction', 1):g}% of the optimizer states"
    places = {"host": "memory of the host", "file": f"a file in {policy.get('directory')}"}
    kinds = {"optimizer": share}
    kinds |= {name: name for name in ("gradients", "parameters", "activations")}
    texts = [
        f"{what} to {places[policy[kind]]}"
        for kind, what in kinds.items()
        if policy.get(kind, "none") != "none"
    ]
    return [f"  offloaded: {', '.join(texts)}"] if texts else []


def warn_batch_norm(model: nn.Module, accumulation: int, ranks: int = 1) -> None:
    """BatchNorm is the one common layer whose result depends on how a batch is split."""
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if norms and accumulation * ranks > 1:
        logger.warning(
            "[trainer] %d BatchNorm layers (%s, ...) see micro-batches, not the global batch: with "
            "accumulation %d%s the training is not that of one big batch; GroupNorm would be",
            len(norms),
            norms[0],
            accumulation,
            f" on {ranks} ranks" if ranks > 1 else "",
        )


class AttentionProbe(TorchFunctionMode):
    """Notes which kernels torch chooses for scaled_dot_product_attention while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.backends: set[str] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                choice = torch._fused_sdp_choice(*args, **kwargs)
            self.backends.add(_backend_name(choice))
        return function(*args, **kwargs)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, watched."""

        def watched(*args: Any) -> Any:
            with self:
                return function(*args)

        return watched

    def line(self) -> str | None:
        if not self.backends:
            return None
        return f"  attention: scaled_dot_product_attention by {', '.join(sorted(self.backends))}"


def _backend_name(choice: int) -> str:
    names = {int(value): name for name, value in torch.nn.attention.SDPBackend.__members__.items()}
    return names.get(int(choice), str(choice)).lower()


def _data(run: RunLength, examples: int | None) -> str:
    if run.updates_per_epoch is None:
        return f"data of unknown length, {run.updates:,} updates"
    samples = f"{examples:,} examples, " if examples is not None else ""
    return (
        f"{samples}{run.updates_per_epoch:,} updates an epoch, "
        f"{run.updates:,} updates in {run.epochs} epochs"
    )


def parameters(model: nn.Module) -> str:
    """How many there are, and how many are trained."""
    numels = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained = sum(numel for numel, requires_grad in numels if requires_grad)
    return f"{trained:,} of {sum(numel for numel, _ in numels):,} parameters are trained"


def types(model: nn.Module) -> set[torch.dtype]:
    """Of floating-point parameters that are trained."""
    return {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}


def changed_types(before: set[torch.dtype], after: set[torch.dtype]) -> str | None:
    """What is to be said of parameters that came in another type than they are kept in; None: nothing."""
    came = before - after
    if not came or not after:
        return None

    def named(dtypes: set[torch.dtype]) -> str:
        return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))

    return (
        f"poise: parameters came in {named(came)} and are kept in {named(after)} from now on; "
        "bf16=True or fp16=True runs the forward in 16 bits, with fp32 parameters"
    )


def precision(policy: dict[str, Any]) -> str:
    """The types of numbers; `policy` is the section of that name."""
    forward, kept = policy["dtype"], policy["parameters"]
    autocast = " (autocast)" if forward != "fp32" and policy["autocast"] else ""
    return f"kept in {kept}, masters fp32, forward {forward}{autocast}"


def _budget(args: TrainingArguments) -> str:
    budget = args.memory_budget
    if not budget:
        return "none"
    text = f"{budget:,} bytes" if isinstance(budget, int) else budget
    if args.global_batch_size is None:
        text += (
            " (with global_batch_size the split that fits it is found; without, it stays as given)"
        )
    return text
