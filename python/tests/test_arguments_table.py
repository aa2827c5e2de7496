"""The table of transformers' arguments: complete, true, and what docs/training_arguments.md is made of."""

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path

import poise
import pytest
import transformers
from poise.arguments_table import OLD_NAMES, TABLE
from poise.training_arguments import TrainingArguments, _Arguments
from test_hf_trainer import losses, made, windows_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training_arguments.md"
THEIRS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
OURS = {field.name for field in dataclasses.fields(_Arguments)}
BY_NAME = {field.name: field for field in TABLE}


def default_of(name):
    field = next(f for f in dataclasses.fields(transformers.TrainingArguments) if f.name == name)
    made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made else field.default


def test_every_field_of_transformers_is_in_the_table_once():
    assert len(BY_NAME) == len(TABLE)
    assert set(BY_NAME) | set(OLD_NAMES) >= THEIRS


def test_mapped_fields_are_poises_and_the_others_are_not():
    for field in TABLE:
        assert (field.name in OURS) == (field.fate == "mapped"), field.name
        assert field.text or field.fate == "mapped", field.name


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_a_field_at_its_default_is_no_error_and_says_nothing(name, caplog):
    with caplog.at_level(logging.INFO, "poise"):
        args = TrainingArguments(**{name: default_of(name)})
    assert caplog.text == ""
    getattr(args, OLD_NAMES.get(name, name))


def test_what_is_refused_says_why_and_what_is_noted_is_told(caplog):
    for field in TABLE:
        if field.fate == "refused":
            with pytest.raises(poise.Error) as error:
                TrainingArguments(**{field.name: "something else"})
            assert field.text in str(error.value)
        elif field.fate == "noted" and field.text and field.name not in OLD_NAMES:
            caplog.clear()
            with caplog.at_level(logging.INFO, "poise"):
                args = TrainingArguments(**{field.name: "something else"})
            assert field.text in caplog.text
            # What a copied compute_loss would multiply by is on never: poise.TrainingArguments.
            always = {"average_tokens_across_devices": False}
            assert getattr(args, field.name) == always.get(field.name, "something else")


def test_transformers_object_with_all_defaults_becomes_poises_defaults(tmp_path):
    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    ours = TrainingArguments(str(tmp_path), use_cpu=True)
    made = TrainingArguments.of(theirs)
    own = [field.name for field in dataclasses.fields(_Arguments)]
    assert [getattr(made, name) for name in own] == [getattr(ours, name) for name in own]
    assert made.output_dir == str(tmp_path)


def test_what_was_set_in_transformers_object_arrives(tmp_path):
    theirs = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=7,
        optim="sgd",
        gradient_checkpointing=True,
        logging_steps=0.5,
        eval_strategy="epoch",
        run_name="mine",
    )
    made = TrainingArguments.of(theirs)
    assert (made.learning_rate, made.lr_scheduler_type, made.warmup_steps) == (3e-4, "cosine", 7)
    assert (made.optim, made.gradient_checkpointing, made.logging_steps) == ("sgd", True, 0.5)
    assert (made.eval_strategy, made.run_name) == ("epoch", "mine")
    assert made.get_process_log_level() == theirs.get_process_log_level()  # its own methods too


def test_a_subclass_keeps_what_it_adds(tmp_path):
    theirs = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, predict_with_generate=True
    )
    made = TrainingArguments.of(theirs)
    assert made.predict_with_generate is True


def test_something_else_is_an_error():
    with pytest.raises(poise.Error, match="args is dict"):
        TrainingArguments.of({})
    with pytest.raises(AttributeError, match="no_such"):
        TrainingArguments().no_such  # noqa: B018


@pytest.mark.parametrize(
    ("fsdp", "stage"), [("full_shard", 3), ("shard_grad_op auto_wrap", 2), (["full_shard"], 3)]
)
def test_fsdp_is_a_stage(fsdp, stage):
    assert TrainingArguments(fsdp=fsdp).zero_stage == stage
    with pytest.raises(poise.Error, match="fsdp has 'offload'"):
        TrainingArguments(fsdp="full_shard offload")


def test_the_page_is_the_table():
    made = subprocess.run(
        [sys.executable, "-m", "poise.reference", "training_arguments"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert PAGE.read_text() == made, (
        "run python -m poise.reference training_arguments > docs/training_arguments.md"
    )


# TrainingArguments(deepspeed=...).

FILE = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "allgather_partitions": True,
        "reduce_scatter": True,
    },
    "bf16": {"enabled": True},
}


def trained(folder, **given):
    from hf_models import causal_rows

    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**args, **given})
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(16))
    trainer.train()
    return trainer


def test_a_deepspeed_file_says_precision_and_stage(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    trainer = trained(tmp_path, deepspeed=str(tmp_path / "ds.json"))
    settings = json.loads(trainer.engine.config.to_json())
    assert settings["zero"]["stage"] == 2
    assert settings["precision"]["parameters"] == "bf16"
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_auto_comes_from_the_arguments(tmp_path):
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_type": "linear",
                **dict.fromkeys(
                    ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
                    "auto",
                ),
            },
        },
    }
    trainer = trained(tmp_path, deepspeed=file, warmup_steps=2, adam_beta2=0.95)
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == pytest.approx([0.0, 0.0, 0.005, 0.01])  # of the update that was made
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    settings = json.loads(trainer.engine.config.to_json())
    assert settings["precision"]["parameters"] == "fp32"  # bf16 is off in the arguments


def test_the_files_own_optimizer_is_used_and_decays_all(tmp_path):
    file = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.5}}}
    trainer = trained(tmp_path, deepspeed=file)
    assert type(trainer.optimizer).__name__ == "SGD"
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])  # the arguments' linear schedule


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, "is 4, and per_device_train_batch_size .* 8"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, and max_grad_norm .* 1.0"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1}}},
            "lr is 1, and learning_rate .* 5e-05",
        ),
    ],
)
def test_a_number_said_twice_must_be_the_same(file, words):
    with pytest.raises(poise.Error, match=words):
        TrainingArguments(deepspeed=file)


def test_one_precision_alone():
    with pytest.raises(poise.Error, match="fp16.enabled is true, and bf16"):
        TrainingArguments(bf16=True, deepspeed={"fp16": {"enabled": True}})
