"""What values a Trainer's arguments may have, alone and together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poise import choices, schedule_arguments
from poise._C import Error
from poise.profiling import read_steps

if TYPE_CHECKING:
    from poise.training_arguments import TrainingArguments


def check(args: TrainingArguments) -> None:
    """Raises Error where one is out of its range, or two contradict each other."""
    if args.bf16 and args.fp16:
        raise Error("[trainer] bf16 and fp16 are both on; choose one")
    choices.check("optimizer_moments", args.optimizer_moments, (None, "fp32", "bf16", "8bit"))
    choices.check("on_misfit", args.on_misfit, ("refuse", "warn"))
    choices.check("logging_strategy", args.logging_strategy, ("no", "steps", "epoch"))
    choices.check("eval_strategy", args.eval_strategy, ("no", "steps", "epoch"))
    choices.check("save_strategy", args.save_strategy, ("no", "steps", "epoch", "best"))
    if not args.save_steps > 0:
        raise Error(f"[trainer] save_steps is {args.save_steps}; give more than 0")
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise Error(f"[trainer] save_total_limit is {args.save_total_limit}; give 1 or more")
    choices.check("train_sampling_strategy", args.train_sampling_strategy, ("random", "sequential"))
    schedule_arguments.check(args)
    read_steps(args.profile_steps)
    for name in (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
    ):
        if getattr(args, name) < 1:
            raise Error(f"[trainer] {name} is {getattr(args, name)}; give 1 or more")
    if args.peak_flops is not None and not args.peak_flops > 0:
        raise Error(
            f"[trainer] peak_flops is {args.peak_flops}; give a device's FLOP/s, for example 989e12"
        )
    if not 0 <= args.label_smoothing_factor < 1:
        raise Error(
            f"[trainer] label_smoothing_factor is {args.label_smoothing_factor}; give a number "
            "in [0, 1)"
        )
    if args.loss_chunk_tokens < 0:
        raise Error(
            f"[trainer] loss_chunk_tokens is {args.loss_chunk_tokens}; give 1 or more, or 0 for "
            "whole logits"
        )
    _check_offload(args)
    _check_ranks(args)
    _check_global_batch(args)
    _check_ramp(args)


def _check_offload(args: TrainingArguments) -> None:
    kinds = ("optimizer", "gradients", "parameters", "activations")
    places = {kind: getattr(args, f"offload_{kind}") for kind in kinds}
    for kind, place in places.items():
        choices.check(f"offload_{kind}", place, ("none", "host", "file"))
    if ("file" in places.values()) != (args.offload_directory is not None):
        raise Error(
            f"[trainer] offload_directory is {args.offload_directory!r} and what is offloaded "
            f"goes to {', '.join(sorted(set(places.values())))}; a file needs a folder, and "
            "nothing else does"
        )


def _check_ranks(args: TrainingArguments) -> None:
    choices.check("zero_stage", args.zero_stage, (0, 1, 2, 3))
    if args.zero_keep_gathered and args.zero_stage != 3:
        raise Error(
            f"[trainer] zero_keep_gathered with zero_stage {args.zero_stage}, which shards no "
            "parameters; set zero_stage to 3, or leave it out"
        )
    size = args.zero_shard_group_size
    if size < 0 or (size > 0 and args.zero_stage == 0):
        raise Error(
            f"[trainer] zero_shard_group_size is {size} at zero_stage {args.zero_stage}; give a "
            "number of ranks at zero_stage 1 to 3, or 0 for all"
        )
    if size > 0 and args.world_size > 1 and args.world_size % size:
        raise Error(
            f"[trainer] zero_shard_group_size {size} does not divide the {args.world_size} ranks; "
            "choose a divisor, the ranks of a node for example"
        )
    if not args.ddp_timeout > 0:
        raise Error(f"[trainer] ddp_timeout is {args.ddp_timeout}; give seconds above 0")


def _check_global_batch(args: TrainingArguments) -> None:
    total, micro = args.global_batch_size, args.per_device_train_batch_size
    if total is None:
        return
    size = args.world_size
    on = f" on {size} ranks" if size > 1 else ""
    if total < 1 or total % (micro * size):
        raise Error(
            f"[trainer] global_batch_size is {total} and per_device_train_batch_size {micro}"
            f"{on}; the first must be a multiple of {micro * size}"
        )
    if args.gradient_accumulation_steps not in (1, args.accumulation):
        raise Error(
            f"[trainer] gradient_accumulation_steps is {args.gradient_accumulation_steps}, but "
            f"global_batch_size {total} in micro-batches of {micro} makes {args.accumulation}"
            f"{on}; leave one out"
        )


def _check_ramp(args: TrainingArguments) -> None:
    first, updates = args.accumulation_ramp_from, args.accumulation_ramp_updates
    if min(first, updates) < 0 or (first > 0) != (updates > 0):
        raise Error(
            f"[trainer] accumulation_ramp_from is {first} and accumulation_ramp_updates {updates}; "
            "a ramp needs both, above 0: where it begins and how many updates it has"
        )
    if first > 0 and args.balance_is_open:
        raise Error(
            "[trainer] accumulation_ramp_from counts micro-batches, whose size memory_budget and "
            "global_batch_size leave open; give per_device_train_batch_size"
        )
    if first > args.accumulation:
        raise Error(
            f"[trainer] accumulation_ramp_from is {first}, more than the {args.accumulation} "
            "micro-batches of a full update; make it smaller"
        )
