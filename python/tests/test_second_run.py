"""train() a second time on one Trainer: moments and loss scale go on, counters and schedule begin anew."""

import poise
import pytest
import torch
import transformers
from balanced_runs import train
from hf_models import causal_rows, made
from test_hf_trainer import arguments, losses, without_strategy
from tiny_models import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


def rates(trainer):
    return [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]


def given_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), None


@pytest.mark.parametrize("optimizers", [None, given_sgd])
@pytest.mark.parametrize("options", [{}, {"warmup_steps": 2, "lr_scheduler_type": "cosine"}])
def test_it_is_as_in_transformers(optimizers, options, tmp_path):
    seen, models = [], []
    for kind in (transformers.Trainer, poise.Trainer):
        args = without_strategy(
            tmp_path / kind.__module__,
            transformers.TrainingArguments,
            num_train_epochs=2,
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            max_grad_norm=0.5,
            **options,
        )
        model = made("gpt2")
        given = {"optimizers": optimizers(model)} if optimizers else {}
        # One batch an epoch, so that their order is the same. transformers divides by all labels, the
        # first of a row too, which is no target: it is masked.
        rows = [
            {"input_ids": r["input_ids"], "labels": r["input_ids"].clone()} for r in causal_rows(8)
        ]
        for row in rows:
            row["labels"][0] = -100
        trainer = kind(model, args, train_dataset=rows, **given)
        runs = []
        for _ in range(3):
            output = trainer.train()
            assert output.global_step == trainer.state.global_step == 2
            runs += [losses(trainer), rates(trainer)]
        seen.append(runs)
        models.append(model)
    for theirs, ours in zip(*seen, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=2e-5)


def test_two_runs_at_a_constant_rate_are_one_long_run(tmp_path):
    options = {"lr_scheduler_type": "constant", "per_device_train_batch_size": 8}
    options["gradient_accumulation_steps"] = 1
    rows, models = causal_rows(8), []
    for epochs, times in ((4, 1), (2, 2)):
        model = made("gpt2")
        args = arguments(tmp_path, num_train_epochs=epochs, **options)
        trainer = poise.Trainer(model, args, train_dataset=rows)
        for _ in range(times):
            trainer.train()
        models.append(model)
    assert same_bits(*models)


def test_two_runs_of_a_balance_that_was_found_are_one_long_run(tmp_path):
    options = {
        "max_steps": 2, "lr_scheduler_type": "constant", "memory_budget": "64MiB", "global_batch_size": 8,
        "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    models = []
    for updates, times in ((4, 1), (2, 2)):
        model = made("gpt2")
        args = poise.TrainingArguments(str(tmp_path), **{**options, "max_steps": updates})
        trainer = poise.Trainer(model, args, train_dataset=causal_rows(16))
        engines = []
        for _ in range(times):
            trainer.train()
            engines.append(trainer.engine)
        assert len(set(map(id, engines))) == 1 and trainer.engine.updates == 4
        models.append(model)
    assert same_bits(*models)


def test_a_second_run_halves_too_and_begins_with_what_the_first_one_came_to(tmp_path):
    """Of a balance that was found."""
    trainer, _ = train(tmp_path, memory_budget="1GiB", separable_loss=True)
    largest, seen = trainer.args.per_device_train_batch_size // 2, []
    assert largest >= 2 and trainer._halving.parts == 1
    inner = trainer._usual_loss

    def loss(batch):
        seen.append(len(batch["ids"]))
        if seen[-1] > largest:
            raise torch.OutOfMemoryError("too many")
        return inner(batch)

    trainer._usual_loss = loss
    engine = trainer.engine
    trainer.train()
    assert trainer.engine is engine and trainer._halving.parts == 2 and max(seen) > largest
    seen.clear()
    trainer.train()
    assert trainer._halving.parts == 2 and max(seen) == largest
    trainer.args = poise.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=1, use_cpu=True, disable_tqdm=True
    )
    with pytest.raises(torch.OutOfMemoryError):  # a split that was given stays
        largest = 0
        trainer.train()


def test_a_resumed_second_run_is_the_unbroken_one(tmp_path):
    rows = causal_rows(32)  # four updates a run

    def twice(folder, steps=-1, resume=None):
        model = made("gpt2")
        trainer = poise.Trainer(model, arguments(folder, save_steps=2), train_dataset=rows)
        if resume is None:
            trainer.train()
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = twice(tmp_path / "a")
    again = twice(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-2"))
    assert same_bits(whole.model, again.model)
    assert rates(again) == rates(whole) == pytest.approx([1e-2 * k / 4 for k in (4, 3, 2, 1)])
    assert [line["skipped"] for line in again.state.log_history if "loss" in line] == [0] * 4


def test_another_model_another_optimizer_and_what_failed_begin_anew(tmp_path):
    rows = causal_rows(16)
    first = poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=rows)
    first.train()
    engine = first.engine
    first.train()
    assert first.engine is engine and engine.updates == 4
    first.args.max_grad_norm = 0.25  # other settings
    first.train()
    assert first.engine is not engine and first.engine.updates == 2
    engine = first.engine

    class Fails(poise.TrainerCallback):
        def on_step_end(self, args, state, control, **details):
            raise ValueError("mine")

    first.add_callback(Fails)
    with pytest.raises(ValueError, match="mine"):
        first.train()
    first.remove_callback(Fails)
    first.train()
    assert first.engine is not engine and first.engine.updates == 2


def test_what_was_frozen_between_two_runs_stays_as_it_was(tmp_path):
    model, rows = made("gpt2"), causal_rows(16)
    trainer = poise.Trainer(model, arguments(tmp_path), train_dataset=rows)
    trainer.train()
    model.transformer.wte.weight.requires_grad_(False)
    before = model.transformer.wte.weight.detach().clone()
    head = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    trainer.train()
    assert torch.equal(model.transformer.wte.weight, before)
    assert not torch.equal(model.transformer.h[0].mlp.c_fc.weight, head)
