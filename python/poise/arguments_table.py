"""Every field of transformers' TrainingArguments and what becomes of it here: the one table that
poise.TrainingArguments goes by and docs/training_arguments.md is made from."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
      name: as in transformers.
      fate: "mapped" (a field of poise.TrainingArguments), "noted" (accepted, it has nothing to do
        here) or "refused" (an error, unless it has a harmless value).
      text: what it does here, or why it does not.
      default: transformers' own.
      harmless: further values that a refused field may have.
      loud: a noted field that somebody may miss is said as a warning.
    """

    name: str
    fate: str
    text: str = ""
    default: Any = None
    harmless: tuple[Any, ...] = ()
    loud: bool = False

    def is_harmless(self, value: Any) -> bool:
        """Whether nobody asked for anything by it."""
        plain = plain_value(value)
        if plain is False and self.default is True:
            return False
        return plain in (None, False, "", [], {}) or any(
            plain == fine for fine in (self.default, *self.harmless)
        )


def plain_value(value: Any) -> Any:
    """Enums of transformers as the text they stand for."""
    return getattr(value, "value", value) if isinstance(value, str) else value


def _mapped(text: str, *names: str) -> list[Field]:
    return [Field(name, "mapped", text) for name in names]


def _noted(text: str, *fields: tuple[str, Any] | str, loud: bool = False) -> list[Field]:
    pairs = [(one, None) if isinstance(one, str) else one for one in fields]
    return [Field(name, "noted", text, default, loud=loud) for name, default in pairs]


def _refused(name: str, text: str, default: Any = None, *harmless: Any) -> Field:
    return Field(name, "refused", text, default, harmless)


_NO_HUB = "poise sends nothing over a network; push the folder that was saved"
TABLE: tuple[Field, ...] = (
    *_mapped(
        "",
        "output_dir",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "lr_scheduler_kwargs",
        "seed",
        "data_seed",
        "use_cpu",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "logging_first_step",
        "disable_tqdm",
        "eval_strategy",
        "eval_delay",
        "eval_on_start",
        "prediction_loss_only",
        "ddp_backend",
    ),
    *_mapped("of matrices, not of biases and norms", "weight_decay"),
    *_mapped("1.0 as in transformers; 0: no clipping", "max_grad_norm"),
    *_mapped(
        "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_bnb_8bit, adam, sgd, adafactor, lion_32bit, "
        "lion_8bit, lamb, lars; "
        "paged_ names are the same optimizer, whose states offload_optimizer moves; others have no "
        "kernel",
        "optim",
    ),
    *_mapped(
        "the shapes of docs/config.md's schedule; further names and settings of transformers are its own "
        "schedulers, over the engine's rates",
        "lr_scheduler_type",
    ),
    *_mapped("updates; in (0, 1): the part of the run", "warmup_steps", "logging_steps"),
    *_mapped("updates; None: logging_steps", "eval_steps"),
    *_mapped("fp32 parameters, a forward under autocast", "bf16", "fp16"),
    *_mapped("every block is recomputed, without reentrance", "gradient_checkpointing"),
    *_mapped("steps, epoch or no", "logging_strategy"),
    *_mapped("of transformers' formula, exact over the window", "label_smoothing_factor"),
    *_mapped("keys of a sample that forward does not take are dropped", "remove_unused_columns"),
    *_mapped(
        "None: forward's arguments with label in their name, and start_positions and end_positions of "
        "question answering",
        "label_names",
    ),
    *_mapped("random or sequential", "train_sampling_strategy"),
    *_mapped("seconds that a rank waits for the others", "ddp_timeout"),
    *_mapped("DeepSpeed's JSON: docs/deepspeed.md", "deepspeed"),
    *_mapped("full_shard: zero_stage 3, shard_grad_op: 2", "fsdp"),
    # Saving.
    *_mapped("steps, epoch, best or no", "save_strategy"),
    *_mapped("updates, or a part of the run", "save_steps"),
    *_mapped("the newest ones stay", "save_total_limit"),
    *_mapped("a path; True: the latest of output_dir", "resume_from_checkpoint"),
    _refused(
        "save_only_model", "`poise inspect --export` takes the model out of a checkpoint", False
    ),
    *_mapped("the best one's state lies in output_dir/best", "load_best_model_at_end"),
    *_mapped("loss unless given", "metric_for_best_model"),
    *_mapped("unless the metric's name ends with loss", "greater_is_better"),
    *_noted(
        "rank 0 writes, once for all", ("save_on_each_node", False), ("save_safetensors", True)
    ),
    *_noted("the order of data is a function of a counter", ("ignore_data_skip", False)),
    *_noted(
        "callbacks keep their state themselves", ("restore_callback_states_from_checkpoint", False)
    ),
    _refused("enable_jit_checkpoint", "a run that is ended between windows is not saved", False),
    *(_refused(name, _NO_HUB, False) for name in ("push_to_hub", "hub_always_push")),
    *_noted(
        "of the hub",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        ("hub_strategy", "every_save"),
        "hub_revision",
        "push_to_hub_model_id",
        "push_to_hub_organization",
        "push_to_hub_token",
    ),
    # Size of an update and of the run.
    *_noted("the mean is always over all counted tokens", ("average_tokens_across_devices", True)),
    _refused(
        "auto_find_batch_size",
        "poise plan finds what fits before the run: set per_device_train_batch_size and "
        "global_batch_size",
        False,
    ),
    # Optimizer.
    _refused("optim_args", "the arguments of the optimizer are fields of their own"),
    _refused("optim_target_modules", "there is no kernel of a low-rank optimizer"),
    _refused("adafactor", 'say optim="adafactor"', False),
    _refused("neftune_noise_alpha", "add the noise in the model's embedding"),
    # Precision.
    *_noted(
        "an evaluation runs in the precision of the run",
        ("bf16_full_eval", False),
        ("fp16_full_eval", False),
    ),
    *_mapped("of torch's matrix products and convolutions, for the process", "tf32"),
    *_noted(
        "there is one way to autocast",
        ("half_precision_backend", "auto"),
        ("fp16_backend", "auto"),
        ("fp16_opt_level", "O1"),
    ),
    # Memory and speed.
    *_noted(
        "blocks are recomputed without reentrance",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
    ),
    *_noted("the same as gradient_checkpointing", "activation_checkpointing"),
    *_noted("a model keeps no cache while it trains", ("use_cache", False)),
    *_noted("memory is counted; nothing is emptied meanwhile", "torch_empty_cache_steps"),
    _refused("torch_compile", "compile the model or its blocks before the Trainer gets it", False),
    *_noted("of torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo"),
    _refused("use_liger_kernel", "loss_chunk_tokens trains without whole logits", False),
    *_noted("of use_liger_kernel", "liger_kernel_config"),
    # Log.
    *_noted("a line's loss is the mean of the finite ones", ("logging_nan_inf_filter", True)),
    *_noted(
        "tokens are always counted",
        ("include_num_input_tokens_seen", "no"),
        ("include_tokens_per_second", False),
    ),
    *_noted("the first rank logs", ("log_on_each_node", True), ("log_level_replica", "warning")),
    *_noted(
        "error and critical show nothing of a run; disable_tqdm leaves out the bar alone",
        ("log_level", "passive"),
    ),
    *_mapped(
        "tensorboard, wandb and comet_ml, where installed; every other service of transformers by its own "
        "callback, where both are; all: what is installed; one that is not there is an error",
        "report_to",
    ),
    *_mapped("of TensorBoard's files; None: output_dir/runs", "logging_dir"),
    *_mapped("in wandb", "run_name", "project"),
    *_noted(
        "of a logging service",
        ("trackio_space_id", "trackio"),
        "trackio_bucket_id",
        "trackio_static_space_id",
    ),
    *_noted("a stopped run names the first value that is not finite", ("debug", "")),
    *_noted("memory is always counted, by account", ("skip_memory_metrics", True)),
    # Evaluation.
    *_noted("predictions are kept on the host", "eval_accumulation_steps"),
    _refused("batch_eval_metrics", "compute_metrics gets the whole, once", False),
    _refused("eval_do_concat_batches", "predictions are joined along their first dimension", True),
    _refused("include_for_metrics", "compute_metrics gets predictions and labels", (), []),
    _refused("include_inputs_for_metrics", "compute_metrics gets predictions and labels", False),
    *_noted("ranks exchange predictions of any shape", ("eval_use_gather_object", False)),
    # Data.
    *_noted("workers live as long as their epoch", ("dataloader_persistent_workers", False)),
    *_noted(
        "batches come in order", ("dataloader_in_order", True), "dataloader_multiprocessing_context"
    ),
    *_noted("of group_by_length", ("length_column_name", "length")),
    *_mapped(
        "torch's deterministic kernels, for the process; on the CPU runs are the same to the bit anyway",
        "full_determinism",
    ),
    # Ranks.
    *_noted("a parameter that gets no gradient counts as zero", "ddp_find_unused_parameters"),
    *_noted(
        "buffers are rank 0's at the start and each rank's own afterwards", "ddp_broadcast_buffers"
    ),
    *_noted("gradients are joined by units of the model", "ddp_bucket_cap_mb", "ddp_static_graph"),
    *_noted(
        "units are the model's repeated blocks, or Trainer(units=...)",
        "fsdp_config",
        ("fsdp_min_num_params", 0),
        "fsdp_transformer_layer_cls_to_wrap",
    ),
    *_noted("ranks share the samples evenly; batches are made on each", "accelerator_config"),
    _refused("parallelism_config", "all ranks are data-parallel"),
    *_noted(
        "the launcher's environment says it",
        ("local_rank", -1),
        ("ray_scope", "last"),
        ("_n_gpu", -1),
    ),
    # Of the script, or of older versions.
    *_noted(
        "for the script to read",
        ("do_train", False),
        ("do_eval", False),
        ("do_predict", False),
        ("overwrite_output_dir", False),
    ),
    *_noted(
        "of other devices, or gone",
        "tpu_num_cores",
        ("tpu_metrics_debug", False),
        ("use_mps_device", False),
        ("jit_mode_eval", False),
        ("use_legacy_prediction_loop", False),
        ("past_index", -1),
        ("mp_parameters", ""),
    ),
    _refused("group_by_length", "samples come in a random order, or as they are", False),
)

OLD_NAMES = {
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "activation_checkpointing": "gradient_checkpointing",
}

_HEAD = """\
# Fields of transformers' TrainingArguments

`poise.Trainer` takes transformers' own TrainingArguments as well as poise's, which have the same names and defaults
and a few more ([at the end](#fields-of-poises-own)). Each field is mapped, accepted with nothing to do, or refused with
a reason; one at its default is never an error. This page is made from the table that the class goes by: `python -m poise.reference training_arguments > docs/training_arguments.md`; a test compares the two
and checks that every field of the installed transformers is here.

| field | here | |
|---|---|---|
"""


def reference() -> str:
    """The page."""
    rows = []
    for field in sorted(TABLE, key=lambda one: one.name):
        fate = {"mapped": "mapped", "noted": "accepted", "refused": "refused"}[field.fate]
        rows.append(f"| `{field.name}` | {fate} | {field.text} |")
    old = [f"- `{name}`: `{new}`" for name, new in OLD_NAMES.items()]
    return _HEAD + "\n".join(rows) + "\n\nOlder names:\n\n" + "\n".join(old) + "\n"
