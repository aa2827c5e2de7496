"""TrainingArguments: names, defaults, and what they become."""

import dataclasses

import poise
import pytest
from poise.arguments import ELSEWHERE
from poise.config import read_config, settings_of
from poise.profiling import read_steps
from poise.run_length import RunLength
from poise.training_arguments import TrainingArguments, _Arguments

# As in transformers 5, where poise has the argument.
DEFAULTS = {
    "output_dir": "trainer_output",
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "tf32": None,
    "full_determinism": False,
    "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
    "label_smoothing_factor": 0.0,
    "deepspeed": None,
    "fsdp": None,
    "remove_unused_columns": True,
    "logging_strategy": "steps",
    "logging_steps": 500,
    "logging_first_step": False,
    "disable_tqdm": None,
    "report_to": "none",
    "logging_dir": None,
    "run_name": None,
    "project": "huggingface",
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_delay": 0,
    "eval_on_start": False,
    "prediction_loss_only": False,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "resume_from_checkpoint": None,
    "seed": 42,
    "data_seed": None,
    "dataloader_drop_last": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
    "train_sampling_strategy": "random",
    "label_names": None,
    "use_cpu": False,
    "ddp_backend": None,
    "ddp_timeout": 1800,
}
OURS = {
    "accumulation_ramp_from",
    "accumulation_ramp_updates",
    "learning_rate_batch_size",
    "learning_rate_scaling",
    "noise_scale",
    "optimizer_moments",
    "global_batch_size",
    "memory_budget",
    "on_misfit",
    "separable_loss",
    "offload_activations",
    "offload_directory",
    "offload_gradients",
    "offload_parameters",
    "offload_optimizer",
    "checkpointing",
    "on_nonfinite",
    "profile_steps",
    "peak_flops",
    "loss_chunk_tokens",
    "zero_stage",
    "zero_keep_gathered",
    "zero_shard_group_size",
    "save_asynchronous",
}


def test_names_and_defaults():
    fields = {field.name: field.default for field in dataclasses.fields(_Arguments)}
    assert set(fields) - OURS == set(DEFAULTS)
    assert {name: fields[name] for name in DEFAULTS} == DEFAULTS
    assert TrainingArguments("somewhere").output_dir == "somewhere"


def test_unknown_argument_names_the_nearest():
    with pytest.raises(
        poise.Error, match="unknown argument learning_rat; did you mean learning_rate"
    ):
        TrainingArguments(learning_rat=1)


def test_names_that_others_use_are_known():
    fields = {field.name for field in dataclasses.fields(_Arguments)}
    assert set(ELSEWHERE.values()) <= fields and not set(ELSEWHERE) & fields
    with pytest.raises(poise.Error, match="micro_batch_size; did you mean per_device_train_batch"):
        TrainingArguments(micro_batch_size=4)


@pytest.mark.parametrize("given", [{"save_only_model": True}, {"push_to_hub": True}])
def test_what_saving_does_not_do_is_refused(given):
    with pytest.raises(poise.Error, match=f"{next(iter(given))} is True: "):
        TrainingArguments(**given)


def test_old_names():
    assert TrainingArguments(warmup_ratio=0.1).warmup_steps == 0.1
    assert TrainingArguments(evaluation_strategy="steps").eval_strategy == "steps"
    assert TrainingArguments(no_cuda=True).device.type == "cpu"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"bf16": True, "fp16": True}, "choose one"),
        ({"optim": "adagrad"}, "use adamw_torch_fused"),
        ({"eval_strategy": "sometimes"}, "use no, steps, epoch"),
        ({"lr_scheduler_type": "cosin"}, "did you mean cosine. There are linear"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "constant_with_warmup"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "linear knows none"),
        ({"per_device_train_batch_size": 0}, "1 or more"),
        ({"per_device_train_batch_size": 8, "global_batch_size": 12}, "multiple"),
        ({"global_batch_size": 32, "gradient_accumulation_steps": 3}, "makes 4"),
        ({"profile_steps": "5-3"}, "first-last"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"loss_chunk_tokens": -1}, "loss_chunk_tokens is -1"),
        ({"save_strategy": "sometimes"}, "save_strategy is 'sometimes'; use no, steps, epoch"),
        ({"optim": "adamw_torchh"}, "optim is 'adamw_torchh'; did you mean adamw_torch"),
        ({"save_steps": 0}, "save_steps is 0"),
        ({"save_total_limit": 0}, "save_total_limit is 0"),
    ],
)
def test_contradictions(arguments, words):
    with pytest.raises(poise.Error, match=words):
        TrainingArguments(**arguments)


def test_what_the_engine_is_told():
    args = TrainingArguments(
        per_device_train_batch_size=2,
        global_batch_size=8,
        learning_rate=1e-3,
        weight_decay=0.1,
        bf16=True,
        memory_budget="1GiB",
        gradient_checkpointing=True,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        seed=7,
    )
    config = settings_of(read_config(args.to_config(total_updates=200)))
    assert config["batch"]["micro_batch_size"] == 2 and config["batch"]["accumulation"] == 4
    assert config["precision"]["dtype"] == "bf16" and config["precision"]["parameters"] == "fp32"
    assert config["optimizer"]["type"] == "adamw" and config["optimizer"]["beta2"] == 0.95
    assert config["optimizer"]["lr"] == 1e-3 and config["optimizer"]["max_grad_norm"] == 0.5
    assert config["schedule"]["type"] == "cosine" and config["schedule"]["warmup_updates"] == 20
    assert config["schedule"]["total_updates"] == 200
    assert config["checkpointing"]["policy"] == "every_n" and config["memory"]["budget_bytes"] in (
        1 << 30,
        "1GiB",
    )
    assert config["engine"]["on_nonfinite"] == "stop" and config["engine"]["seed"] == 7


@pytest.mark.parametrize(
    "arguments, key, value",
    [
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
            "min_lr_ratio",
            0.2,
        ),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}, "power", 2.0),
        ({"lr_scheduler_type": "polynomial"}, "min_lr_ratio", 1e-7 / 5e-5),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 9},
            },
            "decay_updates",
            9,
        ),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, "type", "constant"),
    ],
)
def test_schedules(arguments, key, value):
    schedule = TrainingArguments(**arguments).to_config(100)["schedule"]
    assert (
        schedule[key] == pytest.approx(value)
        if isinstance(value, float)
        else schedule[key] == value
    )
    read_config(TrainingArguments(**arguments).to_config(100))


@pytest.mark.parametrize(
    "batches, arguments, expected",
    [
        (10, {"gradient_accumulation_steps": 4, "num_train_epochs": 2}, (6, 3, 2)),
        (10, {"gradient_accumulation_steps": 4, "num_train_epochs": 0.5}, (2, 3, 1)),
        (10, {"gradient_accumulation_steps": 4, "max_steps": 7}, (7, 3, 3)),
        (3, {"gradient_accumulation_steps": 4, "num_train_epochs": 1}, (1, 1, 1)),
        (None, {"max_steps": 5}, (5, None, 1)),
    ],
)
def test_run_length(batches, arguments, expected):
    run = RunLength.of(batches, TrainingArguments(**arguments))
    assert (run.updates, run.updates_per_epoch, run.epochs) == expected


def test_run_without_length_or_data():
    with pytest.raises(poise.Error, match="max_steps"):
        RunLength.of(None, TrainingArguments())
    with pytest.raises(poise.Error, match="makes no batch"):
        RunLength.of(0, TrainingArguments())


@pytest.mark.parametrize(
    "steps, expected", [(3, (3, 3)), ("3", (3, 3)), ("3-5", (3, 5)), ((2, 4), (2, 4)), (None, None)]
)
def test_profile_steps(steps, expected):
    assert read_steps(steps) == expected
