"""Subclasses written for transformers' Trainer: a training_step as its own source has it, and what is not called."""

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
