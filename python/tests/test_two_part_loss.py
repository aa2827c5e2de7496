"""Pretraining losses of two means over different counts, against the float64 loss of the whole window."""

import json
import sys

import poise
import pytest
import rank_processes
import torch
import torch.nn.functional as F
import transformers
from hf_models import LENGTH, VOCABULARY, causal_rows
from test_hf_trainer import arguments, losses, windows_of

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LABELS = {"bert": "next_sentence_label", "albert": "sentence_order_label"}


def made(kind):
    torch.manual_seed(0)
    if kind == "bert":
        return transformers.BertForPreTraining(transformers.BertConfig(**SIZES))
    config = transformers.AlbertConfig(embedding_size=16, classifier_dropout_prob=0.0, **SIZES)
    return transformers.AlbertForPreTraining(config)


def rows(kind, count=20):
    """Rows with 2 to 12 words that count, and one pair each."""
    return [{**row, LABELS[kind]: torch.tensor(i % 2)} for i, row in enumerate(causal_rows(count))]


def mean_loss(model, kind, window):
    """Of words by their number plus that of pairs by theirs."""
    batch = {name: torch.stack([row[name] for row in window]) for name in window[0]}
    out = model(input_ids=batch["input_ids"])
    pairs = out.seq_relationship_logits if kind == "bert" else out.sop_logits
    words = F.cross_entropy(out.prediction_logits.flatten(0, 1), batch["labels"].flatten())
    return words + F.cross_entropy(pairs, batch[LABELS[kind]])


def reference(kind):
    model, seen = made(kind).double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    windows = windows_of(rows(kind))
    for step, window in enumerate(windows):
        optimizer.param_groups[0]["lr"] = 1e-2 * (len(windows) - step) / len(windows)
        optimizer.zero_grad()
        loss = mean_loss(model, kind, window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(float(loss.detach()))
    return model, seen


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_both_parts_weigh_as_in_one_big_batch(kind, size, tmp_path):
    expected, seen = reference(kind)
    args = arguments(
        tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
    )
    trainer = poise.Trainer(made(kind), args, train_dataset=rows(kind))
    trainer.train()
    assert losses(trainer) == pytest.approx(seen, rel=2e-5)
    for p, q in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p.double(), q, rtol=0, atol=2e-4)


class Steps(poise.TrainerCallback):
    """Makes the Trainer go micro-batch by micro-batch."""

    def on_substep_end(self, args, state, control, **details): ...


def test_so_it_is_with_a_callback_between_micro_batches_and_a_found_balance(tmp_path):
    _, seen = reference("bert")
    for given in (
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
        {"global_batch_size": 8, "memory_budget": "64MiB"},
    ):
        args = poise.TrainingArguments(
            str(tmp_path), num_train_epochs=1, learning_rate=1e-2, logging_steps=1, disable_tqdm=True,
            use_cpu=True, train_sampling_strategy="sequential", separable_loss=True, **given,
        )  # fmt: skip
        trainer = poise.Trainer(made("bert"), args, train_dataset=rows("bert"), callbacks=[Steps()])
        trainer.train()
        assert losses(trainer) == pytest.approx(seen, rel=2e-5)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_an_evaluation_adds_both_means_whatever_its_batch_size(size, tmp_path):
    with torch.no_grad():
        expected = float(mean_loss(made("bert").double(), "bert", rows("bert", 7)))
    args = arguments(tmp_path, per_device_eval_batch_size=size)
    trainer = poise.Trainer(made("bert"), args, eval_dataset=rows("bert", 7))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_without_labels_of_pairs_it_is_the_loss_of_the_words(tmp_path):
    plain = [{k: v for k, v in row.items() if k != LABELS["bert"]} for row in rows("bert", 8)]

    def words(outputs, labels):
        return F.cross_entropy(outputs.prediction_logits.flatten(0, 1), labels.flatten())

    trainer = poise.Trainer(
        made("bert"), arguments(tmp_path), train_dataset=plain, compute_loss_func=words
    )
    trainer.train()
    with torch.no_grad():
        model = made("bert").double()
        batch = {k: torch.stack([row[k] for row in plain]) for k in plain[0]}
        expected = float(words(model(input_ids=batch["input_ids"]), batch["labels"]))
    assert losses(trainer) == pytest.approx([expected], rel=1e-5)


def test_two_ranks_weigh_as_one(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    outputs = rank_processes.finish(rank_processes.start(command, 2))
    seen, evaluated = json.loads(outputs[0].strip().splitlines()[-1])
    model, expected = reference("bert")
    assert seen == pytest.approx(expected, rel=2e-5)
    with torch.no_grad():
        assert evaluated == pytest.approx(
            float(mean_loss(model, "bert", rows("bert", 5))), rel=1e-3
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    args = arguments(
        sys.argv[1], zero_stage=2, global_batch_size=8, gradient_accumulation_steps=1,
        per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = poise.Trainer(made("bert"), args, train_dataset=rows("bert"))
    trainer.train()
    metrics = trainer.evaluate(rows("bert", 5))
    if trainer.is_world_process_zero():
        print(json.dumps([losses(trainer), metrics["eval_loss"]]))
