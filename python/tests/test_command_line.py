"""poise's arguments from a command line: what scripts of transformers do with HfArgumentParser, and ask them then."""

import dataclasses
import json
import logging

import poise
import pytest
import transformers
from hf_models import causal_rows, made
from poise.arguments_table import OLD_NAMES, TABLE


def parsed(line, kind=poise.TrainingArguments):
    [args] = transformers.HfArgumentParser(kind).parse_args_into_dataclasses(line.split())
    return args


def test_a_command_line_is_read_as_by_transformers(tmp_path):
    line = (
        f"--output_dir {tmp_path} --do_train --do_eval --bf16 --learning_rate 3e-4 --logging_steps 5 "
        "--save_steps 0.25 --eval_strategy steps --eval_steps 10 --lr_scheduler_type cosine --max_steps 7 "
        "--no_dataloader_pin_memory --gradient_checkpointing True --label_names a b --seed 3 --use_cpu "
        "--report_to none --weight-decay 0.1 --warmup_steps 4"
    )
    theirs, ours = parsed(line, transformers.TrainingArguments), parsed(line)
    for name in ("output_dir", "do_train", "do_eval", "do_predict", "bf16", "learning_rate", "logging_steps",
                 "save_steps", "eval_steps", "max_steps", "dataloader_pin_memory", "gradient_checkpointing",
                 "label_names", "seed", "use_cpu", "weight_decay", "warmup_steps", "adam_beta2"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.eval_strategy == theirs.eval_strategy.value
    assert ours.lr_scheduler_type == theirs.lr_scheduler_type.value
    assert isinstance(ours.warmup_steps, int) and isinstance(ours.logging_steps, int)


def test_what_nobody_gave_is_not_given():
    args = parsed("--output_dir x --global_batch_size 8 --memory_budget 64MiB")
    assert args.balance_is_open and args.recompute_is_open
    assert not parsed(
        "--output_dir x --global_batch_size 8 --per_device_train_batch_size 4"
    ).balance_is_open
    with pytest.raises(
        poise.Error, match="push_to_hub is True: poise sends nothing over a network"
    ):
        parsed("--output_dir x --push_to_hub")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("--warmup_ratio 0.1", "warmup_steps", 0.1),
        ("--evaluation_strategy epoch", "eval_strategy", "epoch"),
        ("--no_cuda True", "use_cpu", True),
        ("--per_gpu_train_batch_size 3", "per_device_train_batch_size", 3),
        ("--activation_checkpointing True", "gradient_checkpointing", True),
    ],
)
def test_older_names_are_read_too(given, name, value):
    assert getattr(parsed(f"--output_dir x {given}"), name) == value


def test_every_field_has_an_argument_with_a_help():
    fields = {f.name: f for f in dataclasses.fields(poise.TrainingArguments)}
    assert {f.name for f in TABLE if not f.name.startswith("_")} <= set(fields)
    assert set(OLD_NAMES) <= set(fields)
    parser = transformers.HfArgumentParser(poise.Seq2SeqTrainingArguments)
    assert "--predict_with_generate" in parser.format_help()


def test_dictionaries_are_read_as_json():
    args = parsed(
        """--output_dir x --lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":2}"""
    )
    assert args.lr_scheduler_kwargs == {"power": 2}
    with pytest.raises(poise.Error, match="lr_scheduler_kwargs is no JSON"):
        parsed("""--output_dir x --lr_scheduler_kwargs {num_cycles}""")


def test_seq2seq_and_json_files(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"output_dir": "x", "predict_with_generate": True, "max_steps": 2}))
    parser = transformers.HfArgumentParser(poise.Seq2SeqTrainingArguments)
    [args] = parser.parse_json_file(str(path))
    assert args.predict_with_generate and args.max_steps == 2 and args.generation_max_length is None


@dataclasses.dataclass
class Mine(poise.TrainingArguments):
    """As scripts add fields of their own."""

    temperature: float = 2.0
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])


@dataclasses.dataclass
class MineToo(poise.Seq2SeqTrainingArguments):
    temperature: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        self.half = self.temperature / 2


def test_a_subclass_may_be_a_dataclass(tmp_path):
    args = Mine(str(tmp_path), learning_rate=1e-2, temperature=3.0, max_steps=1, use_cpu=True)
    assert (args.temperature, args.names, args.learning_rate) == (3.0, ["a"], 1e-2)
    assert not args.do_train and args.accumulation == 1
    with pytest.raises(poise.Error, match="push_to_hub is True"):
        Mine(push_to_hub=True)
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(8))
    assert trainer.train().global_step == 1 and trainer.args.temperature == 3.0
    args = parsed("--output_dir x --temperature 4 --bf16 --predict_with_generate", MineToo)
    assert (args.temperature, args.half, args.bf16, args.predict_with_generate) == (
        4.0,
        2.0,
        True,
        True,
    )
    assert args.to_dict()["temperature"] == 4.0 and args.to_dict()["predict_with_generate"] is True
    with pytest.raises(poise.Error, match="sortish_sampler: samples come in a random order"):
        MineToo(str(tmp_path), sortish_sampler=True)


def test_a_copy_with_other_values(tmp_path):
    args = parsed("--output_dir x --do_train --warmup_ratio 0.1 --learning_rate 1e-2")
    copied = dataclasses.replace(args, learning_rate=2e-2, per_device_train_batch_size=4)
    assert (copied.learning_rate, copied.warmup_steps, copied.do_train) == (2e-2, 0.1, True)
    assert copied.per_device_train_batch_size == 4


def test_what_scripts_ask_is_answered_as_by_transformers():
    line = "--output_dir x --use_cpu --per_device_train_batch_size 3 --warmup_steps 4 --log_level "
    for level in ("passive", "info", "error"):
        theirs, ours = parsed(line + level, transformers.TrainingArguments), parsed(line + level)
        for name in ("n_gpu", "world_size", "process_index", "local_process_index", "should_log",
                     "should_save", "parallel_mode", "train_batch_size", "eval_batch_size"):  # fmt: skip
            assert getattr(ours, name) == getattr(theirs, name), name
        if level != "passive":  # whatever transformers' logger has
            assert ours.get_process_log_level() == theirs.get_process_log_level()
        assert ours.get_warmup_steps(42) == theirs.get_warmup_steps(42)
    assert parsed("--output_dir x").get_process_log_level() == logging.WARNING
    assert parsed("--output_dir x --warmup_steps 0.1").get_warmup_steps(42) == 5
    with ours.main_process_first(desc="nothing"):
        pass
