"""What an evaluation that the script or a callback asks for tells, beside transformers' Trainer."""

import copy

import poise
import pytest
import transformers
from hf_models import causal_rows, made
from test_hf_trainer import without_strategy

pytestmark = pytest.mark.usefixtures("one_thread")


class Seen(transformers.TrainerCallback):
    """Events of evaluations, with the losses that they tell; evaluates the training data, too."""

    def __init__(self):
        self.events, self.trainer = [], None

    def on_log(self, args, state, control, logs=None, **details):
        losses = {name: value for name, value in logs.items() if name.endswith("_loss")}
        if losses and "train_loss" not in losses:
            self.events.append(("log", state.global_step, losses))

    def on_evaluate(self, args, state, control, metrics=None, **details):
        losses = {name: value for name, value in metrics.items() if name.endswith("_loss")}
        self.events.append(("evaluate", state.global_step, losses))

    def on_epoch_end(self, args, state, control, **details):
        kept = copy.deepcopy(control)  # transformers takes on_evaluate for that of the epoch
        self.trainer.evaluate(self.trainer.train_dataset, metric_key_prefix="seen")
        return kept


def rows(count):
    found = causal_rows(count)
    for row in found:
        row["labels"][0] = -100  # transformers would count it
    return found


def test_evaluations_of_scripts_and_callbacks_are_logged_and_told(tmp_path):
    seen, keys, histories = [], [], []
    for kind in (transformers.Trainer, poise.Trainer):
        args = without_strategy(
            tmp_path / kind.__module__,
            transformers.TrainingArguments,
            **{"num_train_epochs": 2, "per_device_train_batch_size": 8, "eval_strategy": "epoch"},
            **{"gradient_accumulation_steps": 1, "report_to": "none", "save_strategy": "no"},
        )
        callback = Seen()
        data = {"train_dataset": rows(8), "eval_dataset": rows(5)}
        trainer = kind(made("gpt2"), args, callbacks=[callback], **data)
        callback.trainer = trainer
        first = trainer.evaluate()
        trainer.train()
        last = trainer.evaluate({"a": rows(3), "b": rows(4)})
        predicted = trainer.predict(rows(3)).metrics
        seen.append(callback.events)
        keys.append([set(first), set(last), set(predicted)])
        histories.append([line["step"] for line in trainer.state.log_history if "loss" not in line])
    theirs, ours = seen
    assert [event[:2] for event in ours] == [event[:2] for event in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[2] == pytest.approx(other[2], rel=1e-4)
    for mine, other in zip(keys[1], keys[0], strict=True):
        assert {name for name in other - mine if "preparation" not in name} == set()
    assert histories[1] == histories[0]


def test_speeds_are_samples_and_batches_over_seconds(tmp_path):
    args = poise.TrainingArguments(str(tmp_path), per_device_eval_batch_size=4, use_cpu=True)
    trainer = poise.Trainer(made("gpt2"), args, eval_dataset=rows(10))
    metrics = trainer.evaluate()
    seconds = metrics["eval_runtime"]
    assert metrics["eval_samples_per_second"] * seconds == pytest.approx(10)
    assert metrics["eval_steps_per_second"] * seconds == pytest.approx(3)
