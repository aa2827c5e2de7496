"""Every key of a DeepSpeed JSON file and what becomes of it: the one table that the reader goes by and
docs/deepspeed.md is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
      path: sections and name with dots; "section.*" stands for all keys of a section.
      fate: "mapped" (it becomes `to`), "noted" (accepted, it has nothing to do here) or "refused".
      text: what it does here, or why it does not.
      to: a setting of poise ("zero.stage"), or in brackets a part of the DeepSpeed face.
      convert: makes a value of it that of `to`.
      harmless: values that a refused key may have: what it is at when nobody asked for it.
      loud: a noted key that somebody may miss is said as a warning.
    """

    path: str
    fate: str
    text: str
    to: str = ""
    convert: Callable[[Any], Any] | None = None
    harmless: tuple[Any, ...] = ()
    loud: bool = False


def _mapped(path: str, to: str, text: str = "", convert: Callable[[Any], Any] | None = None) -> Key:
    return Key(path, "mapped", text, to, convert)


def _noted(text: str, *paths: str, loud: bool = False) -> list[Key]:
    return [Key(path, "noted", text, loud=loud) for path in paths]


def _refused(path: str, text: str, *harmless: Any) -> Key:
    return Key(path, "refused", text, harmless=(None, *harmless))


_OFF = (False, {}, [])
_NO_BUCKETS = "gradients and parameters travel by units of the model, small neighbours together; no size is to be set"
_BATCH = [
    _mapped("train_batch_size", "batch.global_batch_size", "samples of one update over all ranks"),
    _mapped("train_micro_batch_size_per_gpu", "batch.micro_batch_size"),
    _mapped(
        "gradient_accumulation_steps", "batch.accumulation", "what two of the three leave open"
    ),
    _mapped("gradient_clipping", "optimizer.max_grad_norm", "0, no clipping, unless it is given"),
    _mapped("dataloader_drop_last", "(loader) drop_last"),
    _refused(
        "managed_gradient_accumulation",
        "engine.step(last=True) closes a window of any length instead",
        True,
    ),
]
_OPTIMIZER = [
    _mapped(
        "optimizer.type",
        "(optimizer) class",
        "Adam (decoupled decay unless adam_w_mode is false), AdamW, Lamb, Lion, SGD; others have no kernel",
    ),
    *(
        _mapped(f"optimizer.params.{name}", f"(optimizer) {name}")
        for name in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
    ),
    *(
        _mapped(f"optimizer.params.{name}", f"(optimizer) {name}", f"Lamb's; {default}")
        for name, default in (("max_coeff", "10"), ("min_coeff", "0.01"))
    ),
    _mapped("optimizer.params.adam_w_mode", "(optimizer) class", "Adam: true unless it is given"),
    *_noted(
        "the optimizer's kernel is one for all",
        "optimizer.params.torch_adam",
        "optimizer.params.fused",
        "optimizer.params.foreach",
        "optimizer.legacy_fusion",
    ),
    *_noted(
        "moments are fp32 unless bf16.bf16_optimizer_states is true",
        "optimizer.params.fp32_optimizer_states",
    ),
    _refused("optimizer.params.bias_correction", "Adam's moments are always corrected", True),
    _refused("optimizer.params.amsgrad", "there is no kernel for it", False),
    _refused("optimizer.params.dampening", "SGD is without dampening", 0),
    *(
        _refused(f"optimizer.params.{name}", "of an optimizer without a kernel here")
        for name in (
            "freeze_step",
            "comm_backend_name",
            "cuda_aware",
            "var_freeze_step",
            "var_update_scaler",
            "local_step_scaler",
            "local_step_clipper",
            "factor_max",
            "factor_min",
            "coeff_beta",
            "factor_threshold",
            "eps_inside_sqrt",
            "muon_lr",
            "adam_lr",
            "ns_method",
        )
    ),
    _refused(
        "optimizer.params.max_grad_norm", "say gradient_clipping, outside of the optimizer", 0
    ),
    _mapped(
        "scheduler.type",
        "(scheduler) class",
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; it steps when an update was applied",
    ),
    _mapped("scheduler.params.*", "(scheduler) arguments"),
    *_noted("torch's optimizers are taken over as they are", "zero_allow_untested_optimizer"),
    *_noted("the host's kernels are poise's own", "zero_force_ds_cpu_optimizer"),
    _mapped(
        "communication_data_type",
        "zero.gradient_dtype",
        "fp32 or bf16; summed in fp32",
        lambda v: {"bfp16": "bf16", "bfloat16": "bf16", "float32": "fp32"}.get(v, v),
    ),
    *_noted("there are no sequence-parallel ranks", "seq_parallel_communication_data_type"),
    _refused("gradient_allreduce_op", "an update is the mean over all counted tokens", "mean"),
    *_noted(
        "sums are fp32 and divided once, at the end",
        "prescale_gradients",
        "gradient_predivide_factor",
    ),
    *_noted("momenta are sharded as all moments are", "save_muon_momentum_buffer_in_memory"),
    *_noted("sparse gradients are made dense, which is said once", "sparse_gradients"),
    *_noted("there is one way to join gradients", "disable_allgather"),
]
_CONSECUTIVE = "a clean update always gives the allowance back"
_PRECISION = [
    _mapped("fp16.enabled", "precision.dtype", "fp16, with 16-bit parameters and fp32 masters"),
    _mapped("fp16.loss_scale", "precision.loss_scale", "0: dynamic"),
    _mapped(
        "fp16.initial_scale_power", "precision.initial_loss_scale", "2 to it; 16", lambda v: 2.0**v
    ),
    _mapped("fp16.loss_scale_window", "precision.loss_scale_growth_interval", "1000 unless given"),
    _mapped("fp16.hysteresis", "precision.loss_scale_hysteresis", "2 unless given"),
    _mapped(
        "fp16.min_loss_scale", "precision.min_loss_scale", "an overflow there warns and goes on"
    ),
    *_noted(_CONSECUTIVE, "fp16.consecutive_hysteresis"),
    *_noted("autocast takes inputs of any type", "fp16.auto_cast"),
    _refused("fp16.fp16_master_weights_and_grads", "masters are fp32", False),
    _mapped("bf16.enabled", "precision.dtype", "bf16, with 16-bit parameters and fp32 masters"),
    *_noted("gradients are always checked, at every stage", "bf16.check_grad_overflow"),
    *_noted("gradients are always summed in fp32 as they come", "bf16.immediate_grad_update"),
    _refused("bf16.bf16_master_weights_and_grads", "masters and sums are fp32", False),
    _mapped(
        "bf16.bf16_optimizer_states",
        "optimizer.moments",
        "bf16, rounded stochastically",
        lambda v: "bf16" if v else "fp32",
    ),
    _mapped("torch_autocast.enabled", "precision.dtype", "autocast over fp32 parameters"),
    _mapped("torch_autocast.dtype", "precision.dtype", "bfloat16 or float16"),
    _refused("torch_autocast.lower_precision_safe_modules", "torch's own list decides", [], ()),
    _refused("amp.enabled", "Apex is replaced by torch's autocast: use torch_autocast", False),
    *_noted("of Apex", "amp.*"),
    *_noted("gradients are accumulated in fp32", "data_types.grad_accum_dtype"),
    _refused("data_types.param_dtype", "bf16.enabled and fp16.enabled say it"),
    _refused("data_types.buffer_dtype", "buffers keep the type they have"),
]
_ZERO = [
    _mapped("zero_optimization.stage", "zero.stage"),
    _mapped("zero_optimization.overlap_comm", "zero.overlap", "true unless given, at every stage"),
    _mapped(
        "zero_optimization.stage3_param_persistence_threshold",
        "zero.persistence_threshold",
        "0 unless given",
    ),
    _mapped("zero_optimization.mics_shard_size", "zero.shard_group_size", "-1: all ranks"),
    _mapped(
        "zero_optimization.zero_hpz_partition_size",
        "zero.shard_group_size",
        "1: all ranks; gradients and optimizer states are sharded inside the group, too",
    ),
    *_noted(
        _NO_BUCKETS,
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.sub_group_size",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.round_robin_gradients",
    ),
    *_noted(
        "poise always does: ranks send and keep their part only",
        "zero_optimization.reduce_scatter",
        "zero_optimization.allgather_partitions",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    *_noted(
        "a parameter without a gradient counts as zero",
        "zero_optimization.ignore_unused_parameters",
    ),
    *_noted(
        "a unit is whole while it runs and the next one is fetched meanwhile",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.stage3_module_granularity_threshold",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.stage3_allgather_sequential",
        "zero_optimization.leaf_module.*",
        "zero_optimization.mics_hierarchical_params_gather",
    ),
    *_noted(
        "nothing of the model is replaced",
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.override_module_apply",
        "zero_optimization.pipeline_loading_checkpoint",
        "zero_optimization.legacy_stage1",
    ),
    *_noted(
        "what goes wrong is always checked",
        "zero_optimization.enable_sanity_checks",
        "zero_optimization.log_trace_cache_warnings",
    ),
    *_noted("the norm costs one pass and is always there", "zero_optimization.compute_grad_norm"),
    *(
        _refused(f"zero_optimization.{name}", "parameters and gradients travel unquantised", False)
        for name in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
    ),
    _refused("zero_optimization.zeropp_loco_param", "gradients travel unquantised"),
    _mapped(
        "zero_optimization.offload_optimizer.device",
        "offload.optimizer",
        "cpu: host, nvme: file; at every stage",
        lambda v: {"cpu": "host", "nvme": "file"}.get(v, "none"),
    ),
    _mapped("zero_optimization.offload_optimizer.nvme_path", "offload.directory", "of device nvme"),
    _mapped(
        "zero_optimization.offload_optimizer.ratio",
        "offload.optimizer_fraction",
        "of masters and moments that leave the device, at every stage",
    ),
    _mapped(
        "zero_optimization.offload_param.device",
        "offload.parameters",
        "cpu: host, nvme: file; at stage 3",
        lambda v: {"cpu": "host", "nvme": "file"}.get(v, "none"),
    ),
    _mapped("zero_optimization.offload_param.nvme_path", "offload.directory", "of device nvme"),
    *_noted(
        "poise chooses its staging memory",
        *(
            f"zero_optimization.offload_{what}.{name}"
            for what in ("optimizer", "param")
            for name in ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu")
        ),
        *(
            f"zero_optimization.offload_optimizer.{name}"
            for name in ("pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc")
        ),
    ),
    _refused(
        "zero_optimization.offload_optimizer.super_offload",
        "an update is never begun before its norm is known",
        False,
    ),
    _refused("zero_optimization.zenflow", "every update takes the whole gradient", *_OFF),
    _mapped("aio.block_size", "offload.block_bytes", "of offload to files"),
    _mapped("aio.queue_depth", "offload.queue_depth", "of offload to files"),
    *_noted("poise's files are read and written its own way", "aio.*"),
]
_OTHER = [
    _refused(
        "activation_checkpointing.partition_activations", "there are no model-parallel ranks", False
    ),
    _mapped(
        "activation_checkpointing.cpu_checkpointing",
        "offload.activations",
        "what forward saves for backward waits on the host",
        lambda v: "host" if v else "none",
    ),
    *_noted(
        "recomputation keeps no arena and needs no marks",
        "activation_checkpointing.contiguous_memory_optimization",
        "activation_checkpointing.number_checkpoints",
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "activation_checkpointing.profile",
    ),
    _mapped("steps_per_print", "(engine) a line every so many updates", "none unless given"),
    *_noted(
        "engine.last_result has the times and bytes of every update",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "timers.*",
    ),
    *(
        _mapped(f"{section}.{name}", f"(engine) monitor.{section}", text)
        for section, names, text in (
            ("tensorboard", "enabled output_path job_name", "event files in output_path/job_name"),
            ("csv_monitor", "enabled output_path job_name", "a file for each label there"),
            ("wandb", "enabled group team project", "a run of wandb, which must be installed"),
        )
        for name in names.split()
    ),
    *_noted(
        "not written: tensorboard, csv_monitor and wandb are, and engine.monitor takes a script's own events",
        "comet.*",
        loud=True,
    ),
    *_noted("not measured: poise bench and poise plan tell", "flops_profiler.*", loud=True),
    *_noted("engine.group.traffic() counts what is sent", "comms_logger.*", loud=True),
    *_noted(
        "states are saved whole or not at all, and load on any number of ranks",
        "checkpoint.tag_validation",
        "checkpoint.load_universal",
        "checkpoint.parallel_write.*",
        "checkpoint.writer",
    ),
    _refused("checkpoint.use_node_local_storage", "states go to one shared folder", False),
    _refused("datastates_ckpt", "saving is poise's own", *_OFF),
    _refused("nebula", "saving is poise's own", *_OFF),
    _refused("autotuning", "poise plan finds the fastest plan that fits, before a run", *_OFF),
    *_noted("there are no pipeline stages", "pipeline.*"),
    _refused("tensor_parallel", "there are no tensor-parallel ranks", *_OFF),
    _refused("expert_parallel", "there are no expert-parallel ranks", *_OFF),
    _refused("sequence_parallel_size", "there are no sequence-parallel ranks", 1),
    *_noted("all ranks are data-parallel", "data_parallel_size"),
    _refused("compile.deepcompile", "compile the model's blocks with torch.compile", False),
    *_noted("of DeepCompile", "compile.*"),
    _refused("elasticity", "start the ranks there are: states load on any number", *_OFF),
    *(
        _refused(name, "poise does not change the model or its data while it trains", *_OFF)
        for name in (
            "progressive_layer_drop",
            "eigenvalue",
            "compression_training",
            "quantize_training",
            "sparse_attention",
            "data_efficiency",
            "curriculum_learning",
            "hybrid_engine",
        )
    ),
    *_noted("CUDA graphs are not recorded", "graph_harvesting"),
    *_noted("of the launcher", "hostfile", "vocabulary_size", "use_data_before_expert_parallelism"),
]
TABLE: tuple[Key, ...] = (*_BATCH, *_OPTIMIZER, *_PRECISION, *_ZERO, *_OTHER)

# Older spellings.
OLD_NAMES = {
    "bfloat16": "bf16",
    "zero_optimization.allgather_size": "zero_optimization.allgather_bucket_size",
    "zero_optimization.max_elements_per_comm": "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_param_persitence_threshold": "zero_optimization.stage3_param_persistence_threshold",
}
# Switches of older files: what they were short for.
OLD_SWITCHES = {
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer", {"device": "cpu"}),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param", {"device": "cpu"}),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", {"device": "cpu"}),
    "zero_optimization.cpu_offload_use_pin_memory": ("", {}),
}

_HEAD = """\
# DeepSpeed's settings

`import poise.deepspeed as deepspeed` runs a DeepSpeed script, `from deepspeed.X import Y` being `from
poise.deepspeed.X import Y`: `deepspeed.initialize(...)` and the engine it returns take the calls that scripts make,
and read their JSON (comments, `"auto"` and older names too). Of its modules there are `accelerator`, `checkpointing`,
`comm` (with all of torch.distributed), `ops.adam`, `ops.lamb`, `ops.lion`, `runtime.lr_schedules`, `utils` (logger,
log_dist, RepeatingLoader, safe_get_full_...), `utils.zero_to_fp32` and `zero`; `import poise as deepspeed` gives `accelerator`, `comm`, `ops` and `zero`. This
page is made from the table that the reader goes by: `python -m poise.reference deepspeed > docs/deepspeed.md`; a test
compares the two.

## Beside DeepSpeed

`python examples/compare_with_deepspeed.py` runs [one script](../examples/deepspeed_script.py) with [its
JSON](../examples/deepspeed_script.json) by DeepSpeed and, with that one line changed, by poise: two CPU ranks, stages
1 to 3, accumulation 2, clipping, warmup and decay. Both are held against a plain torch loop in float64 that takes
each update's rows as one batch. Printed with DeepSpeed 0.19.8 and torch 2.11:

20 updates on 2 ranks, 16 of them clipped, loss 5.695 to 3.446; largest relative differences:

| run | over | losses | norms | rates | weights at the end |
|---|---|---|---|---|---|
| plain float32 | float64 | 1.6e-07 | 8.4e-07 | 0.0e+00 | 5.8e-06 |
| stage 1, poise | float64 | 1.0e-07 | 7.8e-07 | 0.0e+00 | 6.7e-06 |
| stage 1, DeepSpeed | float64 | 1.6e-07 | 7.9e-07 | 0.0e+00 | 6.2e-06 |
| stage 1, poise | DeepSpeed | 1.3e-07 | 1.2e-07 | 0.0e+00 | 6.7e-06 |
| stage 2, poise | float64 | 1.1e-07 | 7.7e-07 | 0.0e+00 | 5.4e-06 |
| stage 2, DeepSpeed | float64 | 1.6e-07 | 8.8e-07 | 0.0e+00 | 5.5e-06 |
| stage 2, poise | DeepSpeed | 1.3e-07 | 1.1e-07 | 0.0e+00 | 6.5e-06 |
| stage 3, poise | float64 | 1.1e-07 | 7.7e-07 | 0.0e+00 | 5.4e-06 |
| stage 3, DeepSpeed | float64 | 1.1e-07 | 8.4e-07 | 0.0e+00 | 6.2e-06 |
| stage 3, poise | DeepSpeed | 1.3e-07 | 8.6e-08 | 0.0e+00 | 6.1e-06 |

So each is as near to the other as float32 is to exact. In one run each, at one stage (SGD at all three), the losses
also agreed to 1.5e-7 with SGD without clipping, DeepSpeed's own Adam, its Adam on offloaded states
(`offload_optimizer`), and the schedules WarmupDecayLR by the logarithm, WarmupCosineLR, OneCycle and LRRangeTest.
fp16, Lamb and Lion could not be held against it: DeepSpeed has none on the CPU.

Six things are other than in DeepSpeed, on purpose; the first five were seen with DeepSpeed 0.19.8 running beside poise:

- Nothing is clipped unless `gradient_clipping` says so. DeepSpeed clips at 1.0 then.
- The last window of an epoch of `initialize`'s own loader is an update of its own, not carried into the next epoch (two
  epochs of nine micro-batches at accumulation 2: ten updates, not nine).
- With `bf16.enabled` forward runs under autocast, so that a loss is fp32; DeepSpeed's is bf16, rounded to about 0.03
  where it is 5 (over 20 updates the two curves stayed within 1.3%, the weights within 0.7%).
- What a script writes into parameters within `zero.GatheredParameters(..., modifier_rank=0)` holds after `initialize`
  too. In DeepSpeed the first update takes it back, since its masters do not see it: write before `initialize`, or here.
- `zero.Init` makes a model with the values that it has without. In DeepSpeed models that set the values of their parts'
  parameters afterwards (transformers' GPT-2, torch's TransformerEncoderLayer) began with other ones.
- A micro-batch weighs as many tokens (or samples) as its loss counts, where labels tell; not each the same. Gradients
  are summed in fp32.

`loss.backward()` is `engine.backward(loss)`, whether the engine returned the loss or the script computed it from what the
engine returned. It is an error of a loss that two engines lead to, or that reaches their parameters past them.

`engine.monitor`, and a `MonitorMaster` of the script's own, write events to TensorBoard, wandb and CSV; the engine writes
`Train/Samples/train_loss` (the mean over the window), `lr` and, with fp16, `loss_scale` of every update. In a Trainer
`report_to` says what is written, not the file. `utils.safe_get_full_fp32_param`, `safe_get_full_grad`,
`safe_get_full_optimizer_state` and their `safe_set_full_...` are the same at every stage, offloaded or not; all ranks
call, and a gradient is there after the `backward()` of a window's last micro-batch. `utils.zero_to_fp32` reads poise's
saves, not DeepSpeed's, and writes one file.

What scripts use and this face does not have: `client_state` that is not JSON, `optimizer.cur_scale` (the engine has
it), `utils.safe_get_local_*`, pipelines, experts, tensor parallelism, inference.

A key that is not in the table is an error that names the nearest one. "auto" is what a Trainer fills in
(`TrainingArguments(deepspeed="ds.json")`); in `initialize` it stands for "not given".

"""


def reference() -> str:
    """The page."""
    lines = ["| key | here | |", "|---|---|---|"]
    for key in TABLE:
        here = {"mapped": f"`{key.to}`", "noted": "accepted", "refused": "refused"}[key.fate]
        but = [_shown(v) for v in key.harmless if v not in (None, {}, [], ())]
        text = f"{key.text} (accepted: {', '.join(but)})" if but else key.text
        lines.append(f"| `{key.path}` | {here} | {text} |")
    old = [f"- `{name}`: `{new}`" for name, new in OLD_NAMES.items()]
    old += [
        f"- `{name}`: `{new}` with device cpu" if new else f"- `{name}`: nothing"
        for name, (new, _) in OLD_SWITCHES.items()
    ]
    return _HEAD + "\n".join(lines) + "\n\nOlder names:\n\n" + "\n".join(old) + "\n"


def _shown(value: Any) -> str:
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"
