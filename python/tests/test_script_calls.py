"""Subclasses and scripts that ask a Trainer what transformers' Trainer has, beside that on the same data."""

import poise
import pytest
import torch
import transformers
from hf_models import made, text_rows
from test_hf_trainer import losses, without_strategy
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.usefixtures("one_thread")

BOTH = (transformers.Trainer, poise.Trainer)


def trainer_of(base, folder, **given):
    args = without_strategy(
        folder / base.__module__, transformers.TrainingArguments, report_to="none", save_strategy="no",
        per_device_train_batch_size=8, gradient_accumulation_steps=1, num_train_epochs=3,
        weight_decay=0.1,
    )  # fmt: skip
    return base(made("bert"), args, train_dataset=text_rows(8), eval_dataset=text_rows(4), **given)


def with_teacher(base):
    class Distilled(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher = made("bert", 1)
            self._move_model_to_device(self.teacher, self.model.device)
            self.teacher.eval()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            with torch.no_grad():
                target = self.teacher(**inputs).logits.softmax(-1)
            distance = nn.functional.kl_div(
                outputs.logits.log_softmax(-1), target, reduction="batchmean"
            )
            loss = 0.5 * outputs.loss + 0.5 * distance
            return (loss, outputs) if return_outputs else loss

    return Distilled


def with_groups(base):
    class Grouped(base):
        def create_optimizer(self, model=None):
            decayed = self.get_decay_parameter_names(self.model)
            named = dict(self.model.named_parameters())
            groups = [
                {"params": [p for n, p in named.items() if n in decayed], "weight_decay": 0.1},
                {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
            ]
            kind, settings = base.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(groups, **settings)
            return self.optimizer

    return Grouped


def with_loader(base):
    class Loaded(base):
        def get_train_dataloader(self):
            data = self.train_dataset
            if hasattr(data, "column_names"):
                data = self._remove_unused_columns(data, description="training")
            collate = self._get_collator_with_removed_columns(self.data_collator, "training")
            loader = DataLoader(
                data, batch_size=self._train_batch_size, shuffle=False, collate_fn=collate
            )
            return self.accelerator.prepare(loader)

    return Loaded


@pytest.mark.parametrize("made_of", [with_teacher, with_groups, with_loader])
def test_subclasses_train_as_with_transformers(made_of, tmp_path):
    seen = []
    for base in BOTH:
        trainer = trainer_of(made_of(base), tmp_path)
        trainer.train()
        seen.append(losses(trainer))
    assert len(seen[0]) == 3 and seen[1] == pytest.approx(seen[0], rel=1e-4)


def test_what_they_ask_is_answered_alike(tmp_path):
    answers = []
    for base in BOTH:
        trainer = trainer_of(base, tmp_path)
        trainer.create_optimizer()
        callback = transformers.EarlyStoppingCallback()
        trainer.callback_handler.add_callback(callback)
        answers.append(
            (
                trainer.get_num_trainable_parameters(),
                trainer.get_learning_rates(),
                trainer.num_examples(trainer.get_train_dataloader()),
                trainer.model_wrapped is trainer.model,
                trainer.is_in_train,
                trainer.processing_class,
                sorted(trainer.get_decay_parameter_names(trainer.model)),
                callback in trainer.callback_handler.callbacks,
                callable(trainer.data_collator),
            )
        )
    assert answers[0] == answers[1]
    assert trainer.tokenizer is None
    with pytest.raises(poise.Error, match="hyperparameter_search: poise has none"):
        trainer.hyperparameter_search(n_trials=2)


def test_unused_columns_go_where_a_dataset_can_drop_them(tmp_path):
    class Table(list):
        column_names = ["input_ids", "labels", "text", "idx"]

        def remove_columns(self, names):
            return names

    trainer = trainer_of(poise.Trainer, tmp_path)
    assert trainer._remove_unused_columns(Table()) == ["text", "idx"]
    trainer.args.remove_unused_columns = False
    assert trainer._remove_unused_columns(Table()) == []
