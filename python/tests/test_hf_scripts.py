"""What scripts do around a Trainer's run: callbacks, evaluations, files, and what cannot be meant."""

import copy
import dataclasses
import json
import math

import poise
import pytest
import torch
import transformers
from hf_models import MODELS, causal_rows, made, text_rows
from test_hf_trainer import arguments, losses, without_strategy
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


# Log and callbacks.


class WithLog(poise.Trainer):
    def log(self, logs, start_time=None):
        super().log({**logs, "mine": 1})


def test_subclasses_may_change_a_line(tmp_path):
    trainer = WithLog(made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(8))
    trainer.train()
    assert trainer.state.log_history[-1]["mine"] == 1
    assert '"mine": 1' in (tmp_path / "metrics.jsonl").read_text()


class Recorder(transformers.TrainerCallback):
    def __init__(self):
        self.events = []


def _record(name):
    def method(self, args, state, control, **kwargs):
        assert kwargs["model"] is not None and "processing_class" in kwargs
        self.events.append(name)
        return control

    return method


EVENTS = [n for n in dir(transformers.TrainerCallback) if n.startswith("on_") and "push" not in n]
for event in EVENTS:
    setattr(Recorder, event, _record(event))


def test_callbacks_of_transformers_see_its_events_in_its_order(tmp_path):
    rows = causal_rows(8)
    seen = {}
    for package in (poise, transformers):
        recorder = Recorder()
        args = without_strategy(
            tmp_path,
            package.TrainingArguments,
            eval_strategy="steps",
            eval_steps=1,
            report_to="none",
            save_strategy="no",
        )
        trainer = package.Trainer(
            made("gpt2"), args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[recorder]
        )
        trainer.train()
        seen[package] = recorder.events
    theirs = list(seen[transformers])
    if theirs.count("on_log") > seen[poise].count("on_log"):
        theirs.reverse()
        theirs.remove("on_log")  # of the whole run, which poise returns from train() alone
        theirs.reverse()
    assert sorted(seen[poise]) == sorted(theirs)
    outer = ["on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end",
             "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_epoch_end",
             "on_train_end"]  # fmt: skip
    for events in (seen[poise], theirs):
        order = [e for e in dict.fromkeys(events) if e in outer]
        assert order == outer


def test_flags_stop_the_run_the_epoch_and_evaluate(tmp_path):
    class Flags(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                control.should_epoch_stop = True
            if state.global_step == 3:
                control.should_evaluate = True
                control.should_training_stop = True
            return control

    rows = causal_rows(32)  # 4 updates an epoch
    args = arguments(tmp_path, num_train_epochs=3)
    trainer = poise.Trainer(
        made("gpt2"), args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[Flags]
    )
    assert trainer.train().global_step == 3
    assert any("eval_loss" in line for line in trainer.state.log_history)
    # The first epoch ended after one update: the second update has its first window again.
    first, second = losses(trainer)[:2]
    assert second < first


def test_a_callback_may_replace_the_control_object(tmp_path):
    class Replaces(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return transformers.TrainerControl(should_training_stop=True)

    trainer = poise.Trainer(
        made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(32), callbacks=[Replaces()]
    )
    assert trainer.train().global_step == 1
    assert trainer.pop_callback(Replaces) is not None and trainer.callbacks == []
    trainer.add_callback(Replaces)
    assert isinstance(trainer.callbacks[0], Replaces)


def test_a_callback_before_the_step_sees_and_writes_the_gradient(tmp_path):
    class Zeroes(poise.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for p in model.parameters():
                trainer.engine.gradient(p).zero_()

    model = made("gpt2")
    before = [p.detach().clone() for p in model.parameters()]
    trainer = poise.Trainer(
        model, arguments(tmp_path), train_dataset=causal_rows(8), callbacks=[Zeroes()]
    )
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_callback_that_raises_ends_the_run_with_its_own_exception(tmp_path):
    class Raises(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise LookupError("mine")

    trainer = poise.Trainer(
        made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(16), callbacks=[Raises()]
    )
    with pytest.raises(LookupError, match="mine"):
        trainer.train()
    trainer.callbacks.clear()
    assert trainer.train().global_step == 2  # usable again


@pytest.mark.parametrize(("strategy", "lines"), [("no", 0), ("epoch", 2), ("steps", 8)])
def test_lines_come_by_the_strategy(strategy, lines, tmp_path):
    args = arguments(tmp_path, num_train_epochs=2, logging_strategy=strategy)
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(32))
    trainer.train()
    assert len(losses(trainer)) == lines


# Evaluation.


def test_evaluations_wait_begin_early_and_know_several_datasets(tmp_path):
    rows = causal_rows(32)
    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=1, eval_delay=3, eval_on_start=True
    )
    sets = {"a": rows[:4], "b": rows[4:8]}
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=rows, eval_dataset=sets)
    trainer.train()
    steps = [line["step"] for line in trainer.state.log_history if "eval_a_loss" in line]
    assert steps == [0, 3, 4]
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)


def test_predictions_are_those_of_transformers(tmp_path):
    rows, model = text_rows(10), made("bert")
    kept = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}

    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}

    theirs = transformers.Trainer(
        copy.deepcopy(model),
        without_strategy(tmp_path, transformers.TrainingArguments, report_to="none"),
        eval_dataset=rows,
        compute_metrics=accuracy,
        **kept,
    )
    ours = poise.Trainer(
        model, arguments(tmp_path), eval_dataset=rows, compute_metrics=accuracy, **kept
    )
    a, b = theirs.predict(rows), ours.predict(rows)
    assert (a.predictions == b.predictions).all() and (a.label_ids == b.label_ids).all()
    assert b.metrics["test_accuracy"] == a.metrics["test_accuracy"]
    assert b.metrics["test_loss"] == pytest.approx(a.metrics["test_loss"], rel=1e-5)
    assert ours.evaluate()["eval_accuracy"] == theirs.evaluate()["eval_accuracy"]


def test_scripts_write_their_metrics(tmp_path, capsys):
    trainer = poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(8))
    metrics = trainer.train().metrics
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second"} <= set(metrics)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    assert "train_loss" in capsys.readouterr().out
    assert "train_loss" in (tmp_path / "all_results.json").read_text()
    assert math.isfinite(metrics["train_samples_per_second"])


# What cannot be meant.


def test_labels_outside_the_vocabulary_are_named(tmp_path):
    rows = causal_rows(8)
    rows[3]["labels"] = rows[3]["labels"].clone()
    rows[3]["labels"][5] = 99
    with pytest.raises(poise.Error, match="labels have 99, and the model knows 0 to 30"):
        poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=rows).train()
    classes = [{**row, "labels": torch.tensor(3)} for row in text_rows(8)]
    with pytest.raises(poise.Error, match="labels have 3, and the model knows 0 to 2"):
        poise.Trainer(made("bert"), arguments(tmp_path), train_dataset=classes).train()
    words = [{**row, "input_ids": row["input_ids"] + 20} for row in causal_rows(8)]
    with pytest.raises(poise.Error, match="input_ids have .*, and the model knows 0 to 30"):
        poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=words).train()


def test_a_batch_without_labels_is_named(tmp_path):
    rows = [{"input_ids": row["input_ids"]} for row in causal_rows(8)]
    with pytest.raises(poise.Error, match="the batch has input_ids but no labels"):
        poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=rows).train()


def test_data_without_a_length_needs_max_steps(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(causal_rows(32))

    with pytest.raises(poise.Error, match="has no length; set max_steps"):
        poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=Stream()).train()
    seen = []
    for base in (transformers.Trainer, poise.Trainer):
        args = without_strategy(
            tmp_path,
            transformers.TrainingArguments,
            max_steps=6,
            report_to="none",
            save_strategy="no",
        )
        trainer = base(made("gpt2"), args, train_dataset=Stream())
        assert trainer.train().global_step == 6
        seen.append([(line["step"], round(line["epoch"], 4)) for line in trainer.state.log_history])
    assert seen[1] == seen[0] and seen[0][-1] == (6, round(1 + 2 / 6, 4))


# A script.


@dataclasses.dataclass
class DataArguments:
    max_train_samples: int = dataclasses.field(default=16)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_script_in_the_manner_of_the_examples_runs_with_another_trainer(name, tmp_path):
    # run_clm.py and run_glue.py, with poise's Trainer in the place of transformers'.
    from poise import Trainer

    parser = transformers.HfArgumentParser((DataArguments, transformers.TrainingArguments))
    line = f"--output_dir {tmp_path} --do_train --do_eval --use_cpu True --max_steps 3 --disable_tqdm True"
    line += " --per_device_train_batch_size 2 --learning_rate 1e-2 --seed 7 --report_to none"
    data_args, training_args = parser.parse_args_into_dataclasses(args=line.split())
    rows = MODELS[name][1](data_args.max_train_samples)

    def compute_metrics(prediction):
        predicted = prediction.predictions.argmax(-1)
        return {"accuracy": float((predicted == prediction.label_ids).mean())}

    trainer = Trainer(
        model=made(name),
        args=training_args,
        train_dataset=rows if training_args.do_train else None,
        eval_dataset=rows[:4] if training_args.do_eval else None,
        data_collator=transformers.default_data_collator,
        compute_metrics=compute_metrics,
    )
    result = trainer.train(resume_from_checkpoint=None)
    trainer.save_model()
    metrics = result.metrics
    metrics["train_samples"] = len(rows)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="x")
    assert {"eval_loss", "eval_accuracy"} <= set(metrics)
    again = type(trainer.model).from_pretrained(tmp_path)
    for (key, p), q in zip(again.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(p, q), key
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 3
    assert {"train_loss", "eval_loss"} <= set(
        json.loads((tmp_path / "all_results.json").read_text())
    )
    with pytest.raises(poise.Error, match="sends nothing over a network"):
        trainer.push_to_hub()


def test_a_plain_module_is_saved_too(tmp_path):
    from safetensors.torch import load_file

    model = nn.Linear(3, 2)
    poise.Trainer(model, arguments(tmp_path)).save_model(tmp_path / "model")
    values = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(values["weight"], model.weight)
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["model.safetensors"]
