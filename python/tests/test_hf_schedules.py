"""Learning rate schedules that transformers makes: its further names and settings, beside its own Trainer."""

import sys

import poise
import pytest
import torch
import transformers
from hf_models import made
from test_hf_trainer import arguments, without_strategy
from test_own_steps import even_rows

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = {
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.5},
    "cosine": {"num_cycles": 1.5},
    "cosine_with_min_lr": {"num_cycles": 1.5, "min_lr": 1e-3},
    "inverse_sqrt": {"timescale": 3},
    "warmup_stable_decay": {"num_decay_steps": 3, "decay_type": "linear"},
}


class Rates(transformers.TrainerCallback):
    """Of each update, as its optimizer has it."""

    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, optimizer=None, **details):
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def trained(base, folder, kind, rates=None, **changes):
    args = without_strategy(
        folder, transformers.TrainingArguments, report_to="none", num_train_epochs=4,
        per_device_train_batch_size=8, gradient_accumulation_steps=1, lr_scheduler_type=kind,
        **{"save_strategy": "no", "warmup_steps": 2, **changes},
    )  # fmt: skip
    rows = even_rows(16)
    trainer = base(
        made("gpt2"),
        args,
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[rates] if rates else None,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", SCHEDULES)
def test_rates_are_those_of_transformers(kind, tmp_path):
    seen = []
    for base in (transformers.Trainer, poise.Trainer):
        rates = Rates()
        trained(base, tmp_path / base.__module__, kind, rates, lr_scheduler_kwargs=SCHEDULES[kind])
        seen.append([rate for rate, _ in rates.seen])
    assert len(seen[0]) == 8 and len(set(seen[0])) > 3
    assert seen[1] == pytest.approx(seen[0], rel=1e-6)


def test_a_resumed_run_has_the_rates_of_the_unbroken_one(tmp_path):
    options = {"lr_scheduler_kwargs": {"num_cycles": 2}, "save_strategy": "steps", "save_steps": 3}
    whole = trained(poise.Trainer, tmp_path, "cosine_with_restarts", **options)
    again = poise.Trainer(made("gpt2"), whole.args, train_dataset=even_rows(16))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_plateau_watches_the_evaluations_metric(tmp_path):
    rates = Rates()
    trained(
        poise.Trainer, tmp_path, "reduce_lr_on_plateau", rates, eval_strategy="steps", eval_steps=1,
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 1e9}, warmup_steps=0,
    )  # fmt: skip
    # By such a threshold no evaluation is better: each halves the rate.
    expected = [1e-2 / 2**n for n in range(8)]
    assert [rate for rate, _ in rates.seen] == pytest.approx(expected, rel=1e-6)


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    # Better than the best by more than evaluations here ever are, but the first.
    "lr_scheduler_kwargs": {"patience": 1, "factor": 0.5, "threshold": 0.9, "cooldown": 1},
    **{"eval_strategy": "steps", "eval_steps": 1, "warmup_steps": 0},
}


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_run_resumed_on_a_plateau_is_the_unbroken_one(at, tmp_path):
    def run(folder, base=poise.Trainer, **changes):
        rates = Rates()
        options = {name: value for name, value in PLATEAU.items() if name != "lr_scheduler_type"}
        trainer = trained(base, folder, PLATEAU["lr_scheduler_type"], rates, **options, **changes)
        return trainer, [rate for rate, _ in rates.seen]

    whole, expected = run(tmp_path, save_strategy="steps", save_steps=1)
    _, theirs = run(tmp_path / "theirs", transformers.Trainer)
    assert expected == pytest.approx(theirs, rel=1e-6) and len(set(expected)) > 2
    again, rates = run(
        tmp_path / "again", resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}")
    )
    assert rates == expected[at:]
    for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_plateau_does_not_go_on_from_another_schedule(tmp_path):
    trained(poise.Trainer, tmp_path, "constant", warmup_steps=0, save_strategy="steps")
    with pytest.raises(poise.Error, match="has nothing of what that has seen; resume with"):
        trained(
            poise.Trainer, tmp_path / "again", PLATEAU["lr_scheduler_type"],
            resume_from_checkpoint=str(tmp_path / "checkpoint-8"), warmup_steps=0,
            **{"eval_strategy": "steps", "eval_steps": 1},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "it watches a metric; set eval_strategy"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"power": 1}}, "'power'; cosine knows num_cycles"),
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 1}}, "linear knows none"),
    ],
)  # fmt: skip
def test_what_no_schedule_knows_is_an_error(changes, message, tmp_path):
    with pytest.raises(poise.Error, match=message):
        arguments(tmp_path, **changes)


def test_without_transformers_it_says_what_to_do(tmp_path, monkeypatch):
    args = arguments(tmp_path, lr_scheduler_type="cosine_with_restarts")
    trainer = poise.Trainer(torch.nn.Linear(2, 2), args, train_dataset=[torch.ones(2)])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(poise.Error, match="is made by transformers, which cannot be imported here"):
        trainer.create_scheduler(10)


@pytest.mark.parametrize("name", ["eval_do_concat_batches"])
def test_off_is_no_default_of_what_is_on(name):
    with pytest.raises(poise.Error, match=f"{name} is False"):
        poise.TrainingArguments(**{name: False})
