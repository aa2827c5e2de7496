"""training_step as subclasses of transformers' Trainer have it, beside transformers' own Trainer on the same data: whoever
runs backward, and by whatever the loss is divided."""

import json
import logging
import sys

import poise
import pytest
import rank_processes
import torch
import transformers
from hf_models import causal_rows, made
from hf_own_steps import STEPS, Noted, by_plain_backward
from test_hf_trainer import arguments, losses, reference, windows_of, without_strategy
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def even_rows(count):
    """As many labels in each, none of them the first one, which transformers would count."""
    rows = [
        {"input_ids": row["input_ids"], "labels": row["input_ids"].clone()}
        for row in causal_rows(count)
    ]
    for row in rows:
        row["labels"][0] = -100
    return rows


def trained(base, step, folder, rows, **options):
    args = without_strategy(
        folder, transformers.TrainingArguments, report_to="none", save_strategy="no",
        num_train_epochs=2, **options,
    )  # fmt: skip
    # Both in the order of the data.
    sequential = type("Mine", (base,), {"_get_train_sampler": lambda self, *_: None})
    kind = sequential if base is transformers.Trainer else base
    if base is poise.Trainer:
        args = poise.TrainingArguments.of(args)
        args.train_sampling_strategy = "sequential"
    trainer = STEPS[step](kind)(made("gpt2"), args, train_dataset=rows)
    trainer.train()
    return trainer


# transformers 4 has not what one of 5 calls.
KNOWN = [
    step
    for step in STEPS
    if step != "as of 5" or hasattr(transformers.Trainer, "_prepare_context_parallel_inputs")
]


@pytest.mark.parametrize("step", KNOWN)
def test_losses_and_parameters_are_those_of_transformers(step, tmp_path):
    rows, seen = even_rows(16), []
    for base in (transformers.Trainer, poise.Trainer):
        trainer = trained(base, step, tmp_path / base.__module__, rows)
        seen.append((losses(trainer), list(trainer.model.parameters())))
    (theirs, their_values), (ours, our_values) = seen
    assert len(theirs) == 4 and ours == pytest.approx(theirs, rel=1e-4)
    for p, q in zip(their_values, our_values, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=2e-4)


@pytest.mark.parametrize("step", STEPS)
def test_they_are_token_exact_where_micro_batches_have_more_and_fewer_labels(step, tmp_path):
    rows = causal_rows(20)  # windows of 8, 8 and 4
    expected, seen = reference("gpt2", made("gpt2"), windows_of(rows))
    model = made("gpt2")
    trainer = STEPS[step](poise.Trainer)(model, arguments(tmp_path), train_dataset=rows)
    trainer.train()
    assert losses(trainer) == pytest.approx(seen, rel=2e-5)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p.double(), q, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "changes", [{"bf16": True}, {"fp16": True}, {"gradient_checkpointing": True}], ids=str
)
def test_loss_backward_is_accelerator_backward_to_the_bit(changes, tmp_path):
    models, rows = [], causal_rows(16)
    for step in ("accelerator's", "loss.backward()"):
        trainer = STEPS[step](poise.Trainer)(
            made("gpt2"), arguments(tmp_path, **changes), train_dataset=rows
        )
        trainer.train()
        models.append(trainer.model)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


def test_a_division_by_the_accumulation_is_taken_back_and_told_once(tmp_path, caplog):
    rows = causal_rows(16)
    with caplog.at_level(logging.WARNING, "poise"):
        STEPS["divided"](poise.Trainer)(
            made("gpt2"), arguments(tmp_path), train_dataset=rows
        ).train()
    assert caplog.text.count("divides its loss by 4, as many micro-batches") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, "poise"):
        STEPS["as of 4.57"](poise.Trainer)(
            made("gpt2"), arguments(tmp_path), train_dataset=rows
        ).train()
    assert "divides its loss" not in caplog.text


def test_two_ranks_with_loss_backward_train_as_one_in_float64(tmp_path):
    script = rank_processes.FOLDER / "hf_own_steps.py"
    for stage in (2, 3):
        command = [sys.executable, str(script), str(stage), str(tmp_path)]
        outputs = rank_processes.finish(rank_processes.start(command, 2))
        said = json.loads(outputs[0].strip().splitlines()[-1])
        _, seen = reference("llama", made("llama"), windows_of(causal_rows(20)))
        assert said["losses"] == pytest.approx(seen, rel=2e-5)
        # Rank r has r + 1 in all of its micro-batches.
        assert said["gathered"] == [[1.0, 2.0]] * len(said["gathered"]) and said["sum"] == 3.0


def test_a_backward_of_another_model_stays_torchs_own(tmp_path):
    judge = nn.Linear(16, 1)

    class WithJudge(poise.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            hidden = model(**inputs, output_hidden_states=True)
            judge(hidden.hidden_states[-1].detach()).mean().backward()
            hidden.loss.backward()
            return hidden.loss.detach()

    rows = causal_rows(8)
    trainer = WithJudge(made("gpt2"), arguments(tmp_path), train_dataset=rows)
    trainer.train()
    assert judge.weight.grad.abs().sum() > 0
    plain = poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=rows)
    plain.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-6)


def test_after_the_run_backward_is_torchs_own_again(tmp_path):
    trainer = by_plain_backward(poise.Trainer)(
        made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(8)
    )
    trainer.train()
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    assert other.weight.grad is not None
    with pytest.raises(poise.Error, match=r"outside of training_step\(\)"):
        trainer.accelerator.backward(other(torch.ones(1, 2)).sum())


def test_a_step_without_a_backward_and_one_with_two_are_errors(tmp_path):
    class Forgets(poise.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return self.compute_loss(model, inputs).detach()

    class Again(poise.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.compute_loss(model, inputs).backward()
            return loss

    for kind, message in (
        (Forgets, r"Forgets.training_step\(\) ran no backward"),
        (Again, "ran backward a second time for one micro-batch"),
    ):
        trainer = kind(made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(8))
        with pytest.raises(poise.Error, match=message):
            trainer.train()


def test_a_step_knows_the_last_micro_batch_of_its_update(tmp_path):
    trainer = Noted(made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(20))
    trainer.train()
    assert trainer.synced == [False, False, False, True] * 2 + [False, True]


def test_a_loss_function_given_later_is_used(tmp_path):
    class Later(poise.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.compute_loss_func = lambda outputs, labels: outputs.logits.float().pow(2).mean()

    rows = causal_rows(8)
    counts = [float((row["labels"][1:] != -100).sum()) for row in rows]
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in rows])
        squares = made("gpt2").double()(ids).logits.pow(2).flatten(1).mean(1).tolist()
    trainer = Later(made("gpt2"), arguments(tmp_path), train_dataset=rows)
    trainer.train()
    pairs = [(counts[i] + counts[i + 1], (squares[i] + squares[i + 1]) / 2) for i in range(0, 8, 2)]
    expected = sum(n * value for n, value in pairs) / sum(n for n, _ in pairs)
    assert losses(trainer) == pytest.approx([expected], rel=1e-5)
