"""Callbacks that freeze and free parameters while a run goes on, beside transformers' Trainer."""

import poise
import pytest
import torch
import transformers
from hf_models import causal_rows, made
from test_hf_trainer import arguments, losses, without_strategy
from test_second_run import rates
from tiny_models import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


class Thaws(transformers.TrainerCallback):
    """Freezes and frees the blocks and the embedding before the updates it is told."""

    def __init__(self, plan):
        self.plan = plan

    def on_train_begin(self, args, state, control, model=None, **details):
        self.change(model, 0)

    def on_step_end(self, args, state, control, model=None, **details):
        self.change(model, state.global_step)

    def change(self, model, step):
        for name, trained in self.plan.get(step, {}).items():
            model.get_submodule(name).requires_grad_(trained)


BODY, WORDS = "transformer.h", "transformer.wte"
PLANS = {
    "the body first": {0: {BODY: False}, 3: {BODY: True}},
    "and again": {1: {BODY: False}, 3: {BODY: True, WORDS: False}, 5: {BODY: False, WORDS: True}},
    "for good": {2: {WORDS: False}},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1, "adam_epsilon": 1e-10}, {"optim": "sgd", "learning_rate": 0.1}],
)
def test_frozen_and_freed_parameters_train_as_in_transformers(plan, options, tmp_path):
    rows = [{"input_ids": r["input_ids"], "labels": r["input_ids"].clone()} for r in causal_rows(8)]
    for row in rows:
        row["labels"][0] = -100
    seen, models = [], []
    for kind in (transformers.Trainer, poise.Trainer):
        args = without_strategy(
            tmp_path / kind.__module__,
            transformers.TrainingArguments,
            **{"num_train_epochs": 8, "report_to": "none", "save_strategy": "no"},
            **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            **options,
        )
        model = made("gpt2")
        trainer = kind(model, args, train_dataset=rows, callbacks=[Thaws(PLANS[plan])])
        trainer.train()
        seen.append(losses(trainer) + rates(trainer))
        models.append(model)
    assert seen[1] == pytest.approx(seen[0], rel=2e-4)
    # Of each parameter's way. A bias of keys has no gradient but its rounding, whose sign Adam follows.
    start = dict(made("gpt2").named_parameters())
    for (name, p), q in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        if name.endswith("c_attn.bias"):
            continue
        moved = (q - start[name]).norm()
        assert moved > 0 and (p - q).norm() <= 1e-3 * moved, (name, float((p - q).norm() / moved))


def test_what_is_frozen_keeps_its_bits_and_the_rest_does_not_notice(tmp_path):
    model, rows, kept = made("gpt2"), causal_rows(32), []

    class Keeps(Thaws):
        def on_step_end(self, args, state, control, model=None, **details):
            super().on_step_end(args, state, control, model, **details)
            kept.append(model.transformer.wte.weight.detach().clone())

    args = arguments(tmp_path, bf16=True, gradient_checkpointing=True)
    trainer = poise.Trainer(
        model, args, train_dataset=rows, callbacks=[Keeps({1: {WORDS: False}, 3: {WORDS: True}})]
    )
    trainer.train()
    equal = [torch.equal(a, b) for a, b in zip(kept, kept[1:], strict=False)]
    assert equal == [True, True, False]  # updates 2, 3 and 4


def test_a_plan_that_changes_nothing_changes_no_bit(tmp_path):
    models = []
    for plan in ({}, {1: {WORDS: True}}):
        models.append(made("gpt2"))
        trainer = poise.Trainer(
            models[-1], arguments(tmp_path), train_dataset=causal_rows(16), callbacks=[Thaws(plan)]
        )
        trainer.train()
    assert same_bits(*models)


def test_what_had_no_state_cannot_be_freed_and_torchs_optimizers_say_so(tmp_path):
    model = made("gpt2")
    model.transformer.wte.requires_grad_(False)
    given = {"train_dataset": causal_rows(16)}
    trainer = poise.Trainer(
        model, arguments(tmp_path), callbacks=[Thaws({1: {WORDS: True}})], **given
    )
    with pytest.raises(poise.Error, match="was frozen when the engine was made"):
        trainer.train()
    model = made("gpt2")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = poise.Trainer(
        model,
        arguments(tmp_path),
        optimizers=(sgd, None),
        callbacks=[Thaws({1: {WORDS: False}})],
        **given,
    )
    with pytest.raises(poise.Error, match="was trained when the engine was made, and is frozen"):
        trainer.train()
