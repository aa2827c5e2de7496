"""Subclasses written for transformers' Trainer: a training_step as its own source has it, and what is not called."""

import types

import poise
import pytest
import transformers
from hf_models import causal_rows, made
from test_hf_trainer import arguments, losses, without_strategy

pytestmark = pytest.mark.usefixtures("one_thread")


def with_own_step(base):
    class Own(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    return Own


def test_a_training_step_may_be_a_copy_of_transformers_own(tmp_path):
    rows = causal_rows(8)
    for row in rows:
        row["labels"][0] = -100  # transformers would count it
    seen = []
    for base in (transformers.Trainer, poise.Trainer):
        args = without_strategy(
            tmp_path / base.__module__,
            transformers.TrainingArguments,
            **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            **{"num_train_epochs": 3, "report_to": "none", "save_strategy": "no"},
        )
        trainer = with_own_step(base)(made("gpt2"), args, train_dataset=rows)
        trainer.train()
        seen.append(losses(trainer))
    assert len(seen[0]) == 3 and seen[1] == pytest.approx(seen[0], rel=1e-4)


@pytest.mark.parametrize("name", ["prediction_step", "evaluation_loop", "_get_train_sampler"])
def test_a_method_that_would_not_be_called_is_an_error(name, tmp_path):
    assert hasattr(transformers.Trainer, name)
    kind = type("Mine", (poise.Trainer,), {name: lambda self, *args: None})
    with pytest.raises(
        poise.Error, match=rf"Mine has {name}\(\), which transformers' Trainer calls"
    ):
        kind(made("gpt2"), arguments(tmp_path))
    trainer = poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(4))
    setattr(trainer, name, lambda *args: None)
    for call in (trainer.train, lambda: trainer.evaluate(causal_rows(4))):
        with pytest.raises(
            poise.Error, match=rf"has {name}\(\), which transformers' Trainer calls"
        ):
            call()


def doubled_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs)
    loss = 2 * outputs.loss
    return (loss, outputs) if return_outputs else loss


def doubling_step(self, model, inputs, num_items_in_batch=None):
    loss = 2 * self.compute_loss(model, inputs)
    self.accelerator.backward(loss)
    return loss.detach()


def half_of_the_data(self):
    self.train_dataset = self.train_dataset[:8]
    return poise.Trainer.get_train_dataloader(self)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("compute_loss", doubled_loss),
        ("training_step", doubling_step),
        ("get_train_dataloader", half_of_the_data),
    ],
)
def test_a_method_set_on_the_object_is_one_of_a_subclass(name, method, tmp_path):
    seen = []
    for kind in (poise.Trainer, type("Mine", (poise.Trainer,), {name: method}), None):
        args = arguments(tmp_path, bf16=name == "training_step")
        trainer = (kind or poise.Trainer)(made("gpt2"), args, train_dataset=causal_rows(16))
        if kind is None:
            setattr(trainer, name, types.MethodType(method, trainer))
        trainer.train()
        seen.append((losses(trainer), trainer.evaluate(causal_rows(4))["eval_loss"]))
    assert seen[2] == seen[1] != seen[0]


def test_one_of_several_evaluation_datasets_is_evaluated_by_its_name(tmp_path):
    data = {"short": causal_rows(4), "long": causal_rows(8)[4:]}
    trainer = poise.Trainer(made("gpt2"), arguments(tmp_path), eval_dataset=data)
    both = trainer.evaluate()
    for name in data:
        assert trainer.evaluate(name)["eval_loss"] == both[f"eval_{name}_loss"]
        assert len(list(trainer.get_eval_dataloader(name))) > 0
    with pytest.raises(
        poise.Error, match="no eval_dataset called 'other'; .* by name: short, long"
    ):
        trainer.evaluate("other")
