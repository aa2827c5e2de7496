"""poise.TrainingArguments: the names and defaults of transformers, as far as their rooms exist.

An argument that is not known is an error that names the nearest known one; nothing is ignored.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import logging
from collections.abc import Mapping
from typing import Any

import torch

from poise import ranks, schedule_arguments
from poise._C import Error
from poise.profiling import Steps, read_steps

logger = logging.getLogger("poise")

OPTIMIZERS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw",
    "adamw": "adamw",
    "adam": "adam",
    "sgd": "sgd",
}
OLD_NAMES = {
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
LATER = {  # prefix of arguments: what they wait for
    "save_": "saving arrives with the state room",
    "resume_from_checkpoint": "saving arrives with the state room",
    "load_best_model_at_end": "saving arrives with the state room",
}
INSTEAD = {  # prefix of arguments: what does the same
    "fsdp": "zero_stage=3 shards parameters, gradients and optimizer states over the ranks",
    "deepspeed": "zero_stage=0 to 3 shards as ZeRO does; poise.Engine takes a whole configuration",
    "ddp_find_unused_parameters": "a parameter that gets no gradient counts as zero",
    "ddp_broadcast_buffers": "buffers are rank 0's at the start and each rank's own afterwards",
    "ddp_": "poise joins gradients itself, by units of the model",
    "local_rank": "torchrun, Slurm or mpirun say it in the environment",
}


@dataclasses.dataclass
class _Arguments:
    output_dir: str = "trainer_output"

    # Size of an update and of the run.
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    global_batch_size: int | None = None  # samples of one update; accumulation follows from it
    num_train_epochs: float = 3.0
    max_steps: int = -1  # updates; above 0 it decides instead of num_train_epochs

    # Optimizer and schedule; the schedule counts applied updates.
    optim: str = "adamw_torch_fused"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0  # of matrices only, not of biases and norms
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # 0: no clipping
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: int | float = 0  # updates; in (0, 1): the part of the run

    # Precision: fp32 parameters, a forward under autocast.
    bf16: bool = False
    fp16: bool = False
    on_nonfinite: str = "stop"  # or "skip": a non-finite loss (or gradient, outside fp16)

    # Memory.
    memory_budget: int | str | None = None  # bytes, or "20GiB"; "auto": what the GPU has free
    on_misfit: str = "refuse"  # or "warn": begin although no balance was found that fits
    separable_loss: bool | None = None  # the loss is a mean over tokens or samples by themselves
    loss_chunk_tokens: int = 0  # tokens whose logits exist at once; 0: all of them
    gradient_checkpointing: bool = False  # every block
    checkpointing: str | Mapping | None = None  # a policy, or {"policy": "every_n", "n": 2}

    # Away from the device: none, host (memory), file (in offload_directory).
    offload_optimizer: str = "none"  # masters and moments
    offload_directory: str | None = None  # a folder on a fast disk of this machine

    # Several ranks: torchrun, Slurm or mpirun starts the program once for each.
    zero_stage: int = 0  # sharded: 1 optimizer states, 2 and gradients, 3 and parameters
    zero_keep_gathered: bool = False  # stage 3: parameters stay whole until the update
    ddp_backend: str | None = None  # of torch.distributed; None: nccl for GPUs, gloo for the CPU
    ddp_timeout: float = 1800  # seconds that a rank waits for the others

    # Log and evaluation.
    logging_steps: int | float = 500  # updates; in (0, 1): the part of the run
    logging_first_step: bool = False
    disable_tqdm: bool | None = None  # None: a bar where standard error is a terminal
    profile_steps: Steps = None  # "3-5": a trace of these updates
    eval_strategy: str = "no"  # steps, epoch
    eval_steps: int | None = None  # None: logging_steps

    # Data and randomness.
    seed: int = 42
    data_seed: int | None = None  # None: seed
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_prefetch_factor: int | None = None
    train_sampling_strategy: str = "random"  # or sequential
    use_cpu: bool = False


class TrainingArguments(_Arguments):
    """Settings of a Trainer; see the fields of transformers' class of that name."""

    def __init__(self, output_dir: str | None = None, **arguments: Any) -> None:
        if output_dir is not None:
            arguments["output_dir"] = output_dir
        known = _known(arguments)
        super().__init__(**known)
        self._given = frozenset(known)
        if self.memory_budget == "auto":
            self.memory_budget = _free_memory(self.device)
        if self.balance_is_open:
            self.per_device_train_batch_size = 1  # until the Trainer has found it
        self._check()

    @property
    def balance_is_open(self) -> bool:
        """Whether the Trainer finds micro-batch and accumulation: memory_budget and
        global_batch_size are given, and neither of them is."""
        split = {"per_device_train_batch_size", "gradient_accumulation_steps"}
        return (
            self.memory_budget is not None
            and self.global_batch_size is not None
            and not split & self._given
        )

    @property
    def recompute_is_open(self) -> bool:
        """Whether a found balance may recompute blocks: nothing was said about it."""
        return not {"gradient_checkpointing", "checkpointing"} & self._given

    def with_balance(self, micro_batch: int, checkpointing: Mapping[str, Any]) -> TrainingArguments:
        """The same arguments with a balance that was found."""
        found = copy.copy(self)
        found.per_device_train_batch_size = micro_batch
        found.checkpointing = dict(checkpointing)
        found._given |= {"per_device_train_batch_size", "checkpointing"}
        found._check()
        return found

    @property
    def device(self) -> torch.device:
        return ranks.device(self.use_cpu)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return ranks.here().size

    @property
    def process_index(self) -> int:
        """This rank, from 0."""
        return ranks.here().rank

    @property
    def local_process_index(self) -> int:
        """This rank among those of its machine."""
        return ranks.here().local or 0

    @property
    def accumulation(self) -> int:
        """Micro-batches of one update on a rank."""
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps
        return self.global_batch_size // (self.per_device_train_batch_size * self.world_size)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None

    def to_config(self, total_updates: int) -> dict[str, Any]:
        """The engine's settings for a run of so many updates."""
        return {
            "batch": {
                "micro_batch_size": self.per_device_train_batch_size,
                "accumulation": self.accumulation,
            },
            "precision": {"dtype": "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"},
            "optimizer": {
                "type": OPTIMIZERS[self.optim],
                "lr": self.learning_rate,
                "beta1": self.adam_beta1,
                "beta2": self.adam_beta2,
                "eps": self.adam_epsilon,
                "weight_decay": self.weight_decay,
                "max_grad_norm": self.max_grad_norm,
            },
            "schedule": schedule_arguments.to_schedule(self, total_updates),
            "checkpointing": self._checkpointing(),
            "memory": {"budget_bytes": self.memory_budget or 0},
            "zero": {
                "stage": self.zero_stage,
                "keep_gathered": "window" if self.zero_keep_gathered else "no",
            },
            "offload": {
                "optimizer": self.offload_optimizer,
                "directory": self.offload_directory or "",
            },
            "comm": {"timeout_seconds": self.ddp_timeout},
            "engine": {"on_nonfinite": self.on_nonfinite, "seed": self.seed},
        }

    def _checkpointing(self) -> dict[str, Any]:
        if isinstance(self.checkpointing, Mapping):
            return dict(self.checkpointing)
        if self.checkpointing is not None:
            return {"policy": self.checkpointing}
        return {"policy": "every_n", "n": 1} if self.gradient_checkpointing else {"policy": "none"}

    def _check(self) -> None:
        if self.bf16 and self.fp16:
            raise Error("[trainer] bf16 and fp16 are both on; choose one")
        _one_of("optim", self.optim, OPTIMIZERS)
        _one_of("on_misfit", self.on_misfit, ("refuse", "warn"))
        _one_of("eval_strategy", self.eval_strategy, ("no", "steps", "epoch"))
        _one_of("train_sampling_strategy", self.train_sampling_strategy, ("random", "sequential"))
        schedule_arguments.check(self)
        read_steps(self.profile_steps)
        for name in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        ):
            if getattr(self, name) < 1:
                raise Error(f"[trainer] {name} is {getattr(self, name)}; give 1 or more")
        if self.loss_chunk_tokens < 0:
            raise Error(
                f"[trainer] loss_chunk_tokens is {self.loss_chunk_tokens}; give 1 or more, or 0 for "
                "whole logits"
            )
        _one_of("offload_optimizer", self.offload_optimizer, ("none", "host", "file"))
        if (self.offload_optimizer == "file") != (self.offload_directory is not None):
            raise Error(
                f"[trainer] offload_optimizer is {self.offload_optimizer!r} and offload_directory "
                f"{self.offload_directory!r}; a file needs a folder, and nothing else does"
            )
        self._check_ranks()
        self._check_global_batch()

    def _check_ranks(self) -> None:
        _one_of("zero_stage", self.zero_stage, (0, 1, 2, 3))
        if self.zero_keep_gathered and self.zero_stage != 3:
            raise Error(
                f"[trainer] zero_keep_gathered with zero_stage {self.zero_stage}, which shards no "
                "parameters; set zero_stage to 3, or leave it out"
            )
        if not self.ddp_timeout > 0:
            raise Error(f"[trainer] ddp_timeout is {self.ddp_timeout}; give seconds above 0")

    def _check_global_batch(self) -> None:
        total, micro = self.global_batch_size, self.per_device_train_batch_size
        if total is None:
            return
        size = self.world_size
        on = f" on {size} ranks" if size > 1 else ""
        if total < 1 or total % (micro * size):
            raise Error(
                f"[trainer] global_batch_size is {total} and per_device_train_batch_size {micro}"
                f"{on}; the first must be a multiple of {micro * size}"
            )
        if self.gradient_accumulation_steps not in (1, self.accumulation):
            raise Error(
                f"[trainer] gradient_accumulation_steps is {self.gradient_accumulation_steps}, but "
                f"global_batch_size {total} in micro-batches of {micro} makes {self.accumulation}"
                f"{on}; leave one out"
            )


def _known(arguments: dict[str, Any]) -> dict[str, Any]:
    """Old names become new ones; an unknown one is an error."""
    names = [field.name for field in dataclasses.fields(_Arguments)]
    known: dict[str, Any] = {}
    for name, value in arguments.items():
        new_name = OLD_NAMES.get(name, name)
        if new_name != name:
            logger.info("[trainer] %s is called %s now", name, new_name)
        if new_name not in names:
            raise Error(f"[trainer] unknown argument {name}; {_advice(name, names)}")
        known[new_name] = value
    return known


def _advice(name: str, names: list[str]) -> str:
    for prefix, reason in LATER.items():
        if name.startswith(prefix):
            return f"{reason}, leave it out until then"
    for prefix, reason in INSTEAD.items():
        if name.startswith(prefix):
            return f"leave it out: {reason}"
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"did you mean {nearest}?"


def _free_memory(device: torch.device) -> int:
    if device.type != "cuda":
        raise Error(
            "[trainer] memory_budget is auto, but this run is on the CPU, whose memory others share; "
            'give bytes, or a text such as "8GiB"'
        )
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _one_of(name: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise Error(f"[trainer] {name} is {value!r}; use {', '.join(map(str, allowed))}")
