"""poise.TrainingArguments: the names and defaults of transformers, as far as their rooms exist.

An argument that is not known is an error that names the nearest known one; what is accepted and does
nothing here has its reason in poise.arguments_table.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch

from poise import (
    argument_checks,
    arguments,
    automatic_budget,
    choices,
    command_line,
    placement,
    schedule_arguments,
)
from poise._C import Error
from poise.deepspeed import of_trainer
from poise.placement import Placement
from poise.profiling import Steps
from poise.script_arguments import ScriptArguments

OPTIMIZERS = {  # the engine's names; of paged ones, offload_optimizer moves the states
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw",
    "adamw": "adamw",
    "adam": "adam",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lamb": "lamb",
    "lars": "lars",
    "lion": "lion",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
    "lion_8bit": "lion",
    "paged_lion_8bit": "lion",
    "paged_adamw_32bit": "adamw",
    "paged_adamw": "adamw",
    "adamw_8bit": "adamw",
    "adamw_bnb_8bit": "adamw",
    "paged_adamw_8bit": "adamw",
}
FSDP = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0}  # ZeRO stages


@dataclasses.dataclass
class _Arguments:
    output_dir: str = "trainer_output"

    # Size of an update and of the run.
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    global_batch_size: int | None = None  # samples of one update; accumulation follows from it
    accumulation_ramp_from: int = 0  # micro-batches of the first update on a rank; 0: no ramp
    accumulation_ramp_updates: int = 0  # applied updates over which they grow to all of them
    num_train_epochs: float = 3.0
    max_steps: int = -1  # updates; above 0 it decides instead of num_train_epochs

    # Optimizer and schedule; the schedule counts applied updates.
    optim: str = "adamw_torch_fused"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0  # of matrices only, not of biases and norms
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optimizer_moments: str | None = None  # fp32, bf16, 8bit; None: fp32, or what optim says
    max_grad_norm: float = 1.0  # 0: no clipping
    learning_rate_scaling: str = "none"  # linear, sqrt: by the batch over learning_rate_batch_size
    learning_rate_batch_size: int = 0  # samples of an update that learning_rate is for
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: int | float = 0  # updates; in (0, 1): the part of the run

    label_smoothing_factor: float = 0.0  # in [0, 1)
    deepspeed: Any = None  # DeepSpeed's JSON: a path, a dictionary or text (docs/deepspeed.md)

    # Precision: fp32 parameters, a forward under autocast.
    bf16: bool = False
    fp16: bool = False
    tf32: bool | None = None  # fp32 products of GPUs since Ampere; None: as torch has it
    on_nonfinite: str = "stop"  # or "skip": a non-finite loss (or gradient, outside fp16)

    # Memory.
    memory_budget: int | str | None = None  # bytes, or "20GiB"; "auto": what the GPUs have free
    on_misfit: str = "refuse"  # or "warn": begin although no balance was found that fits
    separable_loss: bool | None = None  # the loss is a mean over tokens or samples by themselves
    loss_chunk_tokens: int = 0  # tokens whose logits exist at once; 0: all of them
    gradient_checkpointing: bool = False  # every block
    checkpointing: str | Mapping | None = None  # a policy, or {"policy": "every_n", "n": 2}

    # Away from the device: none, host (memory), file (in offload_directory).
    offload_optimizer: str = "none"  # masters and moments
    offload_gradients: str = "none"  # their sums
    offload_parameters: str = (
        "none"  # while their block does not run: at zero_stage 3, or on one rank
    )
    offload_activations: str = "none"  # what forward saves for backward
    offload_directory: str | None = None  # a folder on a fast disk of this machine

    # Several ranks: torchrun, Slurm or mpirun starts the program once for each.
    zero_stage: int = 0  # sharded: 1 optimizer states, 2 and gradients, 3 and parameters
    fsdp: Any = None  # full_shard: zero_stage 3, shard_grad_op: 2
    zero_keep_gathered: bool = False  # stage 3: parameters stay whole until the update
    zero_shard_group_size: int = 0  # ranks that shard among themselves (a node's); 0: all
    ddp_backend: str | None = None  # of torch.distributed; None: nccl for GPUs, gloo for the CPU
    ddp_timeout: float = 1800  # seconds that a rank waits for the others

    # Log and evaluation.
    noise_scale: bool = False  # measured and logged, with advice on the batch at the end
    logging_steps: int | float = 500  # updates; in (0, 1): the part of the run
    logging_strategy: str = "steps"  # epoch, no
    logging_first_step: bool = False
    disable_tqdm: bool | None = None  # None: a bar where standard error is a terminal
    profile_steps: Steps = None  # "3-5": a trace of these updates
    peak_flops: float | None = None  # a device's FLOP/s, for MFU; None: of the GPUs that are known
    report_to: Any = "none"  # tensorboard, wandb, comet_ml, ...; a list; all that are installed
    logging_dir: str | None = None  # of TensorBoard's files; None: output_dir/runs
    run_name: str | None = None  # in wandb
    project: str = "huggingface"  # in wandb
    eval_strategy: str = "no"  # steps, epoch
    eval_steps: int | float | None = None  # None: logging_steps
    eval_delay: float = 0  # updates, or epochs where eval_strategy is epoch, before the first one
    eval_on_start: bool = False
    prediction_loss_only: bool = False  # evaluate() does without predictions and compute_metrics

    # Checkpoints: output_dir/checkpoint-N.
    save_strategy: str = "steps"  # no, epoch, best (by metric_for_best_model)
    save_steps: int | float = 500  # updates; in (0, 1): the part of the run
    save_total_limit: int | None = None  # checkpoints that stay, the newest ones; None: all
    load_best_model_at_end: bool = False  # needs evaluations
    metric_for_best_model: str | None = None  # None: loss, where a best one is asked for
    greater_is_better: bool | None = None  # None: unless the metric's name ends with loss
    save_asynchronous: bool = False  # written while the training goes on
    resume_from_checkpoint: str | bool | None = None  # a path; True: the latest of output_dir

    # Data and randomness.
    seed: int = 42
    data_seed: int | None = None  # None: seed
    full_determinism: bool = False  # kernels that give the same bits every time, on a GPU too
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_prefetch_factor: int | None = None
    train_sampling_strategy: str = "random"  # or sequential
    label_names: list[str] | None = None  # None: as forward's arguments say (poise.labels)
    remove_unused_columns: bool = True  # keys of a sample that forward does not take
    use_cpu: bool = False


class TrainingArguments(ScriptArguments, _Arguments):
    """Settings of a Trainer; docs/training_arguments.md has its own fields, every field of
    transformers' class of that name, and what becomes of it. Fields that are accepted and do nothing
    here can be read."""

    found_may_halve = (
        False  # whether the micro-batch was found, and may be halved where memory runs out
    )

    def __init__(self, output_dir: str | None = None, **given: Any) -> None:
        if output_dir is not None:
            given["output_dir"] = output_dir
        self._take(given)

    def __post_init__(self) -> None:
        """A subclass that is a dataclass has an __init__ of its own, which has set all fields."""
        names = [name for name in TrainingArguments.__dataclass_fields__ if name in self.__dict__]
        self._take({name: self.__dict__.pop(name) for name in names})

    def _take(self, given: dict[str, Any]) -> None:
        self._besides: dict[str, Any] = {}
        self._origin: Any = None
        ours, self._besides = arguments.sort_out(given, _names())
        # The engine does it: a compute_loss written for transformers multiplies by the ranks where it is set.
        self._besides["average_tokens_across_devices"] = False
        if set(_names()) <= set(given):  # from a parser, which fills in what nobody gave
            fields = _Arguments.__dataclass_fields__
            ours = {name: v for name, v in ours.items() if v != fields[name].default}
        super().__init__(**ours)
        self._given = frozenset(ours)
        self._take_fsdp()
        if self.memory_budget == "auto":
            automatic_budget.check(self.device)
        if self.balance_is_open:
            self.per_device_train_batch_size = 1  # until the Trainer has found it
        self._check()
        self._deepspeed = None if self.deepspeed is None else of_trainer.read_for(self)

    @classmethod
    def of(cls, given: Any) -> TrainingArguments:
        """The given ones, or those that an object of transformers' class means."""
        if given is None:
            return cls()
        if isinstance(given, TrainingArguments):
            return given
        if not dataclasses.is_dataclass(given) or not hasattr(given, "learning_rate"):
            raise Error(
                f"[trainer] args is {type(given).__name__}; give poise's or transformers' "
                "TrainingArguments"
            )
        made = cls(**arguments.of_transformers(given))
        made._origin = given
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_besides", "_origin", "_given"):
            raise AttributeError(name)
        if name in self._besides:
            return self._besides[name]
        if self._origin is not None and hasattr(self._origin, name):
            return getattr(self._origin, name)
        if name in arguments.FIELDS:
            return arguments.FIELDS[name].default
        if name in arguments.OLD_NAMES:
            return None  # given by its new one
        raise AttributeError(f"TrainingArguments has no {name}")

    @property
    def shards_parameters(self) -> bool:
        """Whether the engine keeps, or may be found to keep, the model in shards: then it moves the
        model to the device."""
        if self.zero_stage == 3 or self.offload_parameters != "none":
            return True
        return self.balance_is_open and any(place.stage == 3 for place in self.open_placements)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is shown but errors: log_level="error" or "critical"."""
        return self.log_level in ("error", "critical")

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

    @property
    def open_placements(self) -> list[Placement]:
        """Ways to lay states out that a found balance may choose from: stages where there are several
        ranks, the host for the optimizer's states where they may leave; what was given stays."""
        theirs = self.deepspeed is not None
        sharding = {"zero_stage", "fsdp", "zero_keep_gathered"} & self._given
        stays = self.world_size == 1 or theirs or sharding or self.zero_stage > 0
        stages = [self.zero_stage] if stays else [0, 1, 2, 3]
        away = self.engine_optimizer in placement.OFFLOADED_OPTIMIZERS
        fixed = theirs or "offload_optimizer" in self._given or self.offload_optimizer != "none"
        places = [self.offload_optimizer] if fixed or not away else ["none", "host"]
        return placement.choices(stages, places)

    def placed(self, place: Placement) -> TrainingArguments:
        """The same arguments with states laid out like that."""
        found = copy.copy(self)
        found.zero_stage, found.offload_optimizer = place.stage, place.optimizer
        found.zero_keep_gathered = self.zero_keep_gathered or place.keep_gathered
        found._check()
        return found

    def with_balance(
        self, micro_batch: int, checkpointing: Mapping[str, Any], *, may_halve: bool
    ) -> TrainingArguments:
        """The same arguments with a balance that was found."""
        found = copy.copy(self)
        found.found_may_halve = may_halve
        found.per_device_train_batch_size = micro_batch
        found.checkpointing = dict(checkpointing)
        found._given |= {"per_device_train_batch_size", "checkpointing"}
        found._check()
        return found

    @property
    def accumulation(self) -> int:
        """Micro-batches of one update on a rank."""
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps
        return self.global_batch_size // (self.per_device_train_batch_size * self.world_size)

    def accumulation_at(self, applied: int) -> int:
        """That of the update after so many applied ones, which a ramp makes smaller."""
        full, first = self.accumulation, self.accumulation_ramp_from
        if applied >= self.accumulation_ramp_updates:
            return full
        return first + (full - first) * applied // self.accumulation_ramp_updates

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None

    @property
    def engine_optimizer(self) -> str:
        """The engine's name of the optimizer."""
        return OPTIMIZERS[self.optim]

    @property
    def engine_moments(self) -> str:
        """What the optimizer's moments are kept in."""
        named = "8bit" if self.optim.endswith("8bit") else "fp32"
        return self.optimizer_moments or named

    @property
    def deepspeed_settings(self) -> Any:
        """What the DeepSpeed file says; None: there is none."""
        return self._deepspeed

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as trackers keep it of a run, those of a subclass too; with what transformers'
        object has besides."""
        besides = self._origin.to_dict() if hasattr(self._origin, "to_dict") else {}
        set_here = [f.name for f in dataclasses.fields(self) if f.name in self.__dict__]
        return {**besides, **{name: getattr(self, name) for name in set_here}}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The same; what is no number, text or bool is written out."""
        plain = (bool, int, float, str)
        return {k: v if isinstance(v, plain) else str(v) for k, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_config(self, total_updates: int) -> dict[str, Any]:
        """The engine's settings for a run of so many updates."""
        config = self._config(total_updates)
        if self._deepspeed is not None:
            optimizer = {**config["optimizer"], **of_trainer.moments(self)}
            config |= {**of_trainer.sections(self), "optimizer": optimizer}
        return config

    def _config(self, total_updates: int) -> dict[str, Any]:
        return {
            "batch": {
                "micro_batch_size": self.per_device_train_batch_size,
                "accumulation": self.accumulation,
                "ramp_from": self.accumulation_ramp_from,
                "ramp_updates": self.accumulation_ramp_updates,
            },
            "precision": {"dtype": "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"},
            "optimizer": {
                "type": OPTIMIZERS[self.optim],
                "momentum": 0.9 if self.optim == "lars" else 0.0,
                "lr": self.learning_rate,
                "beta1": self.adam_beta1,
                "beta2": self.adam_beta2,
                "eps": self.adam_epsilon,
                "weight_decay": self.weight_decay,
                "moments": self.engine_moments,
                "lr_scaling": self.learning_rate_scaling,
                "lr_batch_size": self.learning_rate_batch_size,
                "max_grad_norm": self.max_grad_norm,
            },
            "schedule": schedule_arguments.to_schedule(self, total_updates),
            "checkpointing": self._checkpointing(),
            "memory": {"budget_bytes": self.memory_budget or 0},
            "zero": {
                "stage": self.zero_stage,
                "keep_gathered": "window" if self.zero_keep_gathered else "no",
                "shard_group_size": self.zero_shard_group_size,
            },
            "offload": {
                "optimizer": self.offload_optimizer,
                "gradients": self.offload_gradients,
                "parameters": self.offload_parameters,
                "activations": self.offload_activations,
                "directory": self.offload_directory or "",
            },
            "comm": {"timeout_seconds": self.ddp_timeout},
            "engine": {
                "on_nonfinite": self.on_nonfinite,
                "seed": self.seed,
                "noise_scale": self.noise_scale,
            },
            "state": {"asynchronous": self.save_asynchronous},
        }

    def _checkpointing(self) -> dict[str, Any]:
        if isinstance(self.checkpointing, Mapping):
            return dict(self.checkpointing)
        if self.checkpointing is not None:
            return {"policy": self.checkpointing}
        return {"policy": "every_n", "n": 1} if self.gradient_checkpointing else {"policy": "none"}

    def _check(self) -> None:
        choices.check("optim", self.optim, OPTIMIZERS)
        self._settle_best()
        argument_checks.check(self)

    def _settle_best(self) -> None:
        asked = self.load_best_model_at_end or self.save_strategy == "best"
        if asked and self.eval_strategy == "no":
            name = "load_best_model_at_end" if self.load_best_model_at_end else "save_strategy best"
            raise Error(
                f"[trainer] {name} with eval_strategy no: nothing says which is the best; set "
                "eval_strategy to steps or epoch"
            )
        if asked and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    def _take_fsdp(self) -> None:
        words = self.fsdp if isinstance(self.fsdp, (list, tuple)) else [self.fsdp]
        words = [w for one in words if one for w in str(arguments.plain_value(one)).split()]
        stages = [FSDP[word] for word in words if word in FSDP]
        unknown = [word for word in words if word not in FSDP and word not in ("auto_wrap", "True")]
        if unknown:
            raise Error(
                f"[trainer] fsdp has {unknown[0]!r}; poise knows {', '.join(FSDP)} and auto_wrap"
            )
        if words and self.zero_stage == 0:
            self.zero_stage = stages[0] if stages else 3


def _names() -> list[str]:
    return [field.name for field in dataclasses.fields(_Arguments)]


command_line.describe(TrainingArguments, command_line.with_transformers(_Arguments))
