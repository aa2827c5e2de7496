"""Seq2SeqTrainer: what it generates is what transformers' generates with the same model."""

import copy

import hf_models
import poise
import pytest
import torch
import transformers
from hf_models import causal_rows, made
from test_hf_trainer import arguments, losses

pytestmark = pytest.mark.usefixtures("one_thread")


def collate(rows):
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def lengths(prediction):
    return {"tokens": float((prediction.predictions != -100).sum())}


@pytest.mark.parametrize("beams", [1, 2])
def test_generated_predictions_are_those_of_transformers(beams, tmp_path):
    rows, model = causal_rows(6), made("t5")
    options = {
        "output_dir": str(tmp_path),
        "per_device_eval_batch_size": 4,
        "predict_with_generate": True,
        "generation_max_length": 7,
        "generation_num_beams": beams,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    outputs = []
    for package in (transformers, poise):
        args = package.Seq2SeqTrainingArguments(**options)
        trainer = package.Seq2SeqTrainer(
            copy.deepcopy(model), args, collate, eval_dataset=rows, compute_metrics=lengths
        )
        outputs.append((trainer.predict(rows), trainer.evaluate()))
    (theirs, _), (ours, our_metrics) = outputs
    # Theirs are padded to the length in the model's own settings.
    assert ours.predictions.shape == (6, 7)
    assert (ours.predictions == theirs.predictions[:, :7]).all()
    assert (theirs.predictions[:, 7:] == hf_models.PAD).all()
    assert our_metrics["eval_tokens"] == 6 * 7
    # Theirs is a mean over batches of 4 and 2 rows.
    whole = poise.Trainer(model, arguments(tmp_path), collate, eval_dataset=rows).evaluate()
    assert our_metrics["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)


def test_it_trains_as_the_trainer_does_and_takes_arguments_of_generate(tmp_path):
    rows = causal_rows(8)
    plain = poise.Trainer(made("t5"), arguments(tmp_path), collate, train_dataset=rows)
    plain.train()
    args = arguments(tmp_path, poise.Seq2SeqTrainingArguments, predict_with_generate=True)
    trainer = poise.Seq2SeqTrainer(made("t5"), args, collate, train_dataset=rows)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert trainer.predict(rows, max_new_tokens=3).predictions.shape[1] <= 4
    with pytest.raises(poise.Error, match="sortish_sampler"):
        poise.Seq2SeqTrainingArguments(sortish_sampler=True)
