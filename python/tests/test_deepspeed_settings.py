"""DeepSpeed's settings: how a file is read, what becomes of every key, and its schedules."""

import json
import logging
import math
import subprocess
import sys

import poise
import pytest
import rank_processes
import torch
from poise.deepspeed import keys, schedules
from poise.deepspeed.config import load, parse, read
from torch import nn

# The file.


def test_comments_last_commas_and_old_names_are_read():
    text = """{ // a comment
      "fp16": {"enabled": false, "x": "// no /* comment # here"}, # another
      /* and
         another */ "train_batch_size": 4,
    }"""
    assert parse(text, "")["fp16"]["x"] == "// no /* comment # here"
    with pytest.raises(poise.Error, match="'a' is given twice"):
        parse('{"a": 1, "a": 2}', "")
    with pytest.raises(poise.Error, match="is no JSON"):
        parse("{", "ds.json")
    with pytest.raises(poise.Error, match="nested too deeply"):
        parse('{"a":' * 100000 + "1" + "}" * 100000, "ds.json")
    old = load(
        {
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "bfloat16": {"enabled": True},
        }
    )
    assert old["bf16"] == {"enabled": True}
    assert old["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "stage3_gather_16bit_weights_on_model_save" in old["zero_optimization"]
    assert load({"zero_optimization": True})["zero_optimization"] == {"stage": 1}


def test_a_file_comes_as_path_text_or_base64(tmp_path):
    import base64

    text = '{"train_batch_size": 8}'
    (tmp_path / "ds.json").write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for form in (tmp_path / "ds.json", str(tmp_path / "ds.json"), text, encoded, json.loads(text)):
        assert read(form).engine["batch"] == {"micro_batch_size": 8, "accumulation": 1}
    with pytest.raises(poise.Error, match="no file"):
        read("missing.json")


@pytest.mark.parametrize(
    ("given", "ranks", "batch"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2, (4, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 2, (4, 4)),
        ({"train_batch_size": 32}, 2, (16, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, 2, (4, 1)),
        ({"gradient_accumulation_steps": 4}, 1, (1, 4)),
        ({}, 1, (1, 1)),
    ],
)
def test_two_batch_numbers_make_the_third(given, ranks, batch):
    found = read(given, ranks).engine["batch"]
    assert (found["micro_batch_size"], found["accumulation"]) == batch


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            r"train_batch_size is 32, but .* is 4 x 2 x 2 = 16",
        ),
        (
            {"train_batch_size": 9, "gradient_accumulation_steps": 2},
            r"\? x 2 x 2 = a multiple of 4",
        ),
        ({"train_batch_size": 9}, "9 on 2 ranks"),
        ({"train_batch_size": "9"}, "give an integer"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both on"),
        ({"zero_optimization": {"stage": 4}}, "use 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "cpu at stage 2, where parameters are not sharded",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            "use none, cpu or nvme",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "device nvme without nvme_path",
        ),
        ({"zero_optimisation": {"stage": 2}}, "did you mean zero_optimization"),
        ({"zero_optimization": {"stag": 2}}, "did you mean zero_optimization.stage?"),
        ({"autotuning": {"enabled": True}}, "poise plan finds"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "unquantised"),
        ({"optimizer": {"params": {"lr": 1}}}, "give the type"),
        ({"gradient_clipping": "much"}, "give a number"),
        ({"communication_data_type": "fp16"}, "fp32 or bf16"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_says_why(given, message):
    with pytest.raises(poise.Error, match=message):
        read(given, ranks=2)


# The table.

# What DeepSpeed's documentation and sources name, section by section.
DOCUMENTED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
managed_gradient_accumulation gradient_clipping dataloader_drop_last
optimizer.type optimizer.params.lr optimizer.params.torch_adam optimizer.params.adam_w_mode
optimizer.params.fp32_optimizer_states optimizer.params.freeze_step
optimizer.params.comm_backend_name optimizer.params.cuda_aware optimizer.params.var_freeze_step
optimizer.params.var_update_scaler optimizer.params.local_step_scaler
optimizer.params.local_step_clipper optimizer.params.max_coeff optimizer.params.min_coeff
optimizer.params.factor_max optimizer.params.factor_min optimizer.params.muon_lr
optimizer.params.adam_lr optimizer.params.momentum optimizer.params.ns_method
save_muon_momentum_buffer_in_memory scheduler.type scheduler.params.warmup_max_lr
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type
seq_parallel_communication_data_type gradient_allreduce_op prescale_gradients
gradient_predivide_factor sparse_gradients disable_allgather
fp16.enabled fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window
fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale fp16.fp16_master_weights_and_grads
bf16.enabled bf16.check_grad_overflow bf16.immediate_grad_update bf16.bf16_master_weights_and_grads
bf16.bf16_optimizer_states torch_autocast.enabled torch_autocast.dtype
torch_autocast.lower_precision_safe_modules amp.enabled amp.opt_level
data_types.grad_accum_dtype data_types.param_dtype data_types.buffer_dtype
zero_optimization.stage zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.reduce_bucket_size
zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size
zero_optimization.overlap_comm zero_optimization.round_robin_gradients
zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint
zero_optimization.ignore_unused_parameters zero_optimization.sub_group_size
zero_optimization.stage3_prefetch_bucket_size
zero_optimization.stage3_param_persistence_threshold
zero_optimization.stage3_model_persistence_threshold
zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
zero_optimization.stage3_gather_16bit_weights_on_model_save
zero_optimization.stage3_module_granularity_threshold
zero_optimization.stage3_use_all_reduce_for_fetch_params
zero_optimization.stage3_allgather_sequential zero_optimization.leaf_module.classes
zero_optimization.leaf_module.names zero_optimization.leaf_module.name_suffixes
zero_optimization.memory_efficient_linear zero_optimization.override_module_apply
zero_optimization.pipeline_loading_checkpoint zero_optimization.zero_hpz_partition_size
zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights
zero_optimization.zero_quantized_gradients zero_optimization.zeropp_loco_param
zero_optimization.mics_shard_size zero_optimization.mics_hierarchical_params_gather
zero_optimization.enable_sanity_checks zero_optimization.log_trace_cache_warnings
zero_optimization.legacy_stage1 zero_optimization.compute_grad_norm zero_optimization.zenflow
zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size
zero_optimization.offload_param.max_in_cpu zero_optimization.offload_param.pin_memory
zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.nvme_path
zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.pin_memory
zero_optimization.offload_optimizer.pipeline_read
zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.fast_init
zero_optimization.offload_optimizer.ratio zero_optimization.offload_optimizer.super_offload
zero_optimization.offload_optimizer.cpuadam_cores_perc
aio.block_size aio.queue_depth aio.intra_op_parallelism aio.single_submit aio.overlap_events
aio.use_gds aio.thread_count activation_checkpointing.partition_activations
activation_checkpointing.cpu_checkpointing
activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints
activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile
steps_per_print wall_clock_breakdown memory_breakdown dump_state timers.throughput.enabled
tensorboard.enabled csv_monitor.output_path wandb.project comet.samples_log_interval
flops_profiler.profile_step comms_logger.prof_all autotuning checkpoint.tag_validation
checkpoint.load_universal checkpoint.use_node_local_storage checkpoint.parallel_write.pipeline_stage
checkpoint.writer datastates_ckpt nebula pipeline.stages tensor_parallel expert_parallel
sequence_parallel_size data_parallel_size compile.deepcompile compile.free_activation elasticity
progressive_layer_drop eigenvalue compression_training data_efficiency curriculum_learning
hybrid_engine graph_harvesting
"""


@pytest.mark.parametrize("path", DOCUMENTED.split())
def test_every_documented_key_has_a_fate(path):
    from poise.deepspeed.config import _key_of

    key = _key_of(path)
    assert key.fate in ("mapped", "noted", "refused")
    assert key.text or key.to


OFFLOADED = {"device": "nvme", "nvme_path": "out"}
SAMPLES = {  # of mapped keys: a value, and what poise's settings then say
    "train_batch_size": (8, ("batch", "micro_batch_size", 8)),
    "train_micro_batch_size_per_gpu": (3, ("batch", "micro_batch_size", 3)),
    "gradient_accumulation_steps": (5, ("batch", "accumulation", 5)),
    "gradient_clipping": (0.7, ("optimizer", "max_grad_norm", 0.7)),
    "bf16.bf16_optimizer_states": (True, ("optimizer", "moments", "bf16")),
    "communication_data_type": ("bfloat16", ("zero", "gradient_dtype", "bf16")),
    "fp16.enabled": (True, ("precision", "parameters", "fp16")),
    "fp16.loss_scale": (128, ("precision", "loss_scale", 128)),
    "fp16.initial_scale_power": (5, ("precision", "initial_loss_scale", 32.0)),
    "fp16.loss_scale_window": (7, ("precision", "loss_scale_growth_interval", 7)),
    "fp16.hysteresis": (3, ("precision", "loss_scale_hysteresis", 3)),
    "fp16.min_loss_scale": (2, ("precision", "min_loss_scale", 2)),
    "bf16.enabled": (True, ("precision", "parameters", "bf16")),
    "torch_autocast.enabled": (True, ("precision", "dtype", "bf16")),
    "torch_autocast.dtype": ("torch.float16", ("precision", "dtype", "fp16")),
    "zero_optimization.offload_optimizer.device": ("cpu", ("offload", "optimizer", "host")),
    "zero_optimization.offload_optimizer.nvme_path": ("x", ("offload", "directory", "x")),
    "zero_optimization.offload_param.device": ("cpu", ("offload", "parameters", "host")),
    "zero_optimization.offload_param.nvme_path": ("x", ("offload", "directory", "x")),
    "zero_optimization.offload_optimizer.ratio": (0.5, ("offload", "optimizer_fraction", 0.5)),
    "activation_checkpointing.cpu_checkpointing": (True, ("offload", "activations", "host")),
    "aio.block_size": (8192, ("offload", "block_bytes", 8192)),
    "aio.queue_depth": (4, ("offload", "queue_depth", 4)),
    "zero_optimization.stage": (3, ("zero", "stage", 3)),
    "zero_optimization.mics_shard_size": (2, ("zero", "shard_group_size", 2)),
    "zero_optimization.zero_hpz_partition_size": (2, ("zero", "shard_group_size", 2)),
    "zero_optimization.overlap_comm": (False, ("zero", "overlap", False)),
    "zero_optimization.stage3_param_persistence_threshold": (
        1e4,
        ("zero", "persistence_threshold", 10000),
    ),
}


def nested(path, value):
    *sections, name = path.split(".")
    made = {name: value}
    for section in reversed(sections):
        made = {section: made}
    return made


def test_every_mapped_key_reaches_the_setting_that_the_table_names():
    of_engine = [k for k in keys.TABLE if k.fate == "mapped" and not k.to.startswith("(")]
    assert {k.path for k in of_engine} == set(SAMPLES)
    for key in of_engine:
        value, (section, name, expected) = SAMPLES[key.path]
        given = nested(key.path, value)
        top = key.path.split(".")[0]
        if top in ("bf16", "fp16", "torch_autocast"):
            given[top].setdefault("enabled", True)
        if key.to in ("offload.directory", "offload.block_bytes", "offload.queue_depth"):
            what = "offload_param" if "param" in key.path else "offload_optimizer"
            offload = given.setdefault("zero_optimization", {}).setdefault(what, {})
            offload.update({k: v for k, v in OFFLOADED.items() if k not in offload})
        if key.to == "offload.optimizer_fraction":
            given["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
        if "offload_param" in key.path:
            given["zero_optimization"]["stage"] = 3
        if "stage3" in key.path or key.to == "zero.shard_group_size":
            given[top]["stage"] = 3
        settings = read(given).engine
        assert settings[section][name] == expected, key.path
        assert key.to.split(".")[0] == section or key.to == "batch.global_batch_size"
        poise.Config.from_json(json.dumps(settings))  # poise knows it


def test_every_noted_key_is_accepted_and_told(caplog):
    for key in keys.TABLE:
        if key.fate == "noted":
            path = key.path.replace(".*", ".anything")
            with caplog.at_level(logging.INFO, "poise"):
                read(nested(path, 1)).tell_notes()
            assert key.text in caplog.text, path


def test_every_refused_key_is_refused_with_its_reason_and_harmless_at_its_default():
    for key in keys.TABLE:
        if key.fate != "refused":
            continue
        for fine in key.harmless:
            read(nested(key.path, fine))
        with pytest.raises(poise.Error) as error:
            read(nested(key.path, "something else"))
        assert key.text in str(error.value)


def test_auto_is_what_a_trainer_fills_in():
    settings = read({"train_batch_size": "auto", "fp16": {"enabled": "auto"}})
    assert settings.auto == ["train_batch_size", "fp16.enabled"]


@pytest.mark.parametrize(
    ("every", "updates"), [(math.inf, 0), (None, 0), (2000, 2000), (1e5, 100000)]
)
def test_lines_are_printed_as_often_as_it_says(every, updates):
    assert read({"steps_per_print": every}).steps_per_print == updates


def test_a_monitor_that_is_on_and_not_written_is_missed_aloud(caplog):
    with caplog.at_level(logging.WARNING, "poise"):
        read({"comet": {"enabled": True}, "comms_logger": {"enabled": False}}).tell_notes()
    assert "comet" in caplog.text and "comms_logger" not in caplog.text


def test_the_page_is_the_table():
    page = rank_processes.FOLDER.parents[1] / "docs" / "deepspeed.md"
    made = subprocess.run(
        [sys.executable, "-m", "poise.reference", "deepspeed"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert page.read_text() == made, "run python -m poise.reference deepspeed > docs/deepspeed.md"


# Schedules, by the formulas of DeepSpeed's documentation.


def rates(kind, steps, lr=1.0, **params):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = schedules.SCHEDULES[kind](optimizer, **params)
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps - 1):
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def test_warmup_and_decay_rates_update_by_update():
    log4 = [0.0, 0.0, math.log(2) / math.log(4), math.log(3) / math.log(4)]
    given = {"warmup_max_lr": 1.0, "warmup_num_steps": 4}
    assert rates("WarmupLR", 6, **given) == pytest.approx([*log4, 1.0, 1.0])
    line = rates("WarmupLR", 6, **given, warmup_type="linear", warmup_min_lr=0.2)
    assert line == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 1.0])
    at_once = [rates("WarmupLR", 4, warmup_max_lr=1.0, warmup_num_steps=n) for n in (0, 2)]
    assert at_once[0] == at_once[1] == pytest.approx([0.0, 0.0, 1.0, 1.0])
    decay = rates("WarmupDecayLR", 10, **given, total_num_steps=8)
    assert decay == pytest.approx([*log4, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_rates_are_parts_of_the_optimizers_own():
    seen = rates(
        "WarmupCosineLR", 9, lr=2.0, total_num_steps=6, warmup_num_steps=2, warmup_type="linear"
    )
    floor = 0.0001
    cosine = [
        floor + (1 - floor) * (1 + math.cos(math.pi * min(1, n / 4))) / 2 for n in range(1, 7)
    ]
    assert seen == pytest.approx([2 * r for r in (0.0, 0.0, 0.5, *cosine)])


def test_range_test_and_one_cycle():
    given = {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 2}
    assert rates("LRRangeTest", 4, **given) == pytest.approx([0.5, 0.75, 1.0, 1.25])
    stairs = rates("LRRangeTest", 5, **given, lr_range_test_staircase=True)
    assert stairs == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.5])
    cycle = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}
    seen = rates("OneCycle", 7, **cycle, cycle_second_step_size=4)
    assert seen == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_one_cycle_moves_beta1_the_other_way():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    schedule = schedules.OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2)
    seen = []
    for _ in range(3):
        schedule.step()
        seen.append(optimizer.param_groups[0]["betas"][0])
    assert seen == pytest.approx([0.85, 0.8, 0.85])


def test_a_schedule_goes_on_from_its_state():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = schedules.WarmupLR(optimizer, 0.0, 1.0, 8, "linear")
    for _ in range(5):
        schedule.step()
    state, rate = schedule.state_dict(), optimizer.param_groups[0]["lr"]
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    resumed = schedules.WarmupLR(other, 0.0, 1.0, 8, "linear")
    resumed.load_state_dict(state)
    assert other.param_groups[0]["lr"] == rate == 0.5
