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


def ragged(rows):
    """Labels, and decoder inputs made of them, as long as the longest of the batch."""
    longest = max(len(row["labels"]) for row in rows)
    labels = torch.full((len(rows), longest), -100)
    for padded, row in zip(labels, rows, strict=True):
        padded[: len(row["labels"])] = row["labels"]
    batch = collate([{"input_ids": row["input_ids"]} for row in rows])
    begins = labels.masked_fill(labels == -100, hf_models.PAD)
    return {**batch, "labels": labels, "decoder_input_ids": begins}


def ragged_rows(count):
    return [
        {**row, "labels": row["labels"][: 3 + 2 * i]} for i, row in enumerate(causal_rows(count))
    ]


def metrics_of(prediction):
    """What depends on shapes and values of both arrays."""
    predictions, labels = prediction
    same = predictions[:, : labels.shape[1]] == labels[:, : predictions.shape[1]]
    return {
        "tokens": int((predictions != -100).sum()),
        "sum": int(predictions.sum()),
        "labels": int(labels.sum()),
        "alike": float(same.mean()),
    }


def both(folder, rows, collator=collate, model=None, call=None, processing_class=None, **changes):
    """(predict, evaluate) of transformers' Trainer and of ours."""
    model = model or made("t5")
    options = {
        "output_dir": str(folder),
        "per_device_eval_batch_size": 4,
        "predict_with_generate": True,
        "use_cpu": True,
        "disable_tqdm": True,
        **changes,
    }
    for package in (transformers, poise):
        args = package.Seq2SeqTrainingArguments(**options)
        trainer = package.Seq2SeqTrainer(
            copy.deepcopy(model),
            args,
            collator,
            eval_dataset=rows,
            compute_metrics=metrics_of,
            processing_class=processing_class,
        )
        yield trainer.predict(rows, **(call or {})), trainer.evaluate(**(call or {}))


def check_equal(theirs, ours):
    (a, a_metrics), (b, b_metrics) = theirs, ours
    for one, other in ((a.predictions, b.predictions), (a.label_ids, b.label_ids)):
        assert one.shape == other.shape and one.dtype == other.dtype and (one == other).all()
    for name in ("tokens", "sum", "labels", "alike"):
        assert a.metrics[f"test_{name}"] == b.metrics[f"test_{name}"]
        assert a_metrics[f"eval_{name}"] == b_metrics[f"eval_{name}"]


@pytest.mark.parametrize(
    "options",
    [
        {"generation_max_length": 7},
        {"generation_max_length": 7, "generation_num_beams": 2},
        {"generation_max_length": 25},
        {"call": {"max_length": 9, "num_beams": 2}},
        {"call": {"max_new_tokens": 30}},
        {"collator": ragged, "rows": ragged_rows(6), "generation_max_length": 20},
        {"collator": ragged, "rows": ragged_rows(6), "generation_max_length": 5},
        {"generation_config": transformers.GenerationConfig(
            max_length=10, pad_token_id=3, decoder_start_token_id=0, num_beams=2)},
        {"generation_config": transformers.GenerationConfig(
            max_new_tokens=24, pad_token_id=0, decoder_start_token_id=0)},
    ],
    ids=lambda options: ",".join(options),
)  # fmt: skip
def test_predictions_labels_and_metrics_are_those_of_transformers(options, tmp_path):
    theirs, ours = both(tmp_path, **{"rows": causal_rows(6), **options})
    check_equal(theirs, ours)


def test_without_a_length_every_batch_has_the_usual_one(tmp_path):
    (theirs, their_metrics), (ours, our_metrics) = both(tmp_path, causal_rows(6))
    width = ours.predictions.shape[1]
    assert width == (20 if made("t5").generation_config.max_length is None else 21)
    # Of transformers 5 the first batch has one more.
    assert (ours.predictions == theirs.predictions[:, :width]).all()
    assert (ours.label_ids == theirs.label_ids).all()
    for name in ("eval_tokens", "eval_sum", "eval_alike"):  # their second call has no such batch
        assert our_metrics[name] == their_metrics[name]


def test_padding_is_the_tokenizers_and_its_absence_an_error(tmp_path):
    class Tokenizer:
        pad_token_id, eos_token_id = None, 9

        def pad(self, rows, **_):
            return collate(rows)

        def save_pretrained(self, folder): ...

    rows = causal_rows(6)
    theirs, ours = both(tmp_path, rows, processing_class=Tokenizer(), generation_max_length=7)
    check_equal(theirs, ours)
    assert (ours[0].predictions[:, 7:] == 9).all()
    model = made("t5")
    model.config.pad_token_id = None
    args = poise.Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True)
    trainer = poise.Seq2SeqTrainer(model, args, collate)
    with pytest.raises(poise.Error, match="there is no pad token; set pad_token_id"):
        trainer.predict([{"input_ids": row["input_ids"]} for row in rows], max_length=5)


def test_a_saved_generation_config_is_read_by_its_path(tmp_path):
    saved = transformers.GenerationConfig(
        max_length=11, pad_token_id=0, decoder_start_token_id=0, eos_token_id=None
    )
    saved.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "generation_config.json"):
        theirs, ours = both(tmp_path, causal_rows(5), generation_config=str(path))
        check_equal(theirs, ours)
        assert ours[0].predictions.shape == (5, 11)


def test_a_generation_config_that_is_not_there_is_an_error_and_asks_no_hub(tmp_path):
    args = arguments(
        tmp_path, poise.Seq2SeqTrainingArguments, generation_config=str(tmp_path / "absent")
    )
    with pytest.raises(poise.Error, match="absent: there is no such file or folder"):
        poise.Seq2SeqTrainer(made("t5"), args, collate)


def test_arguments_of_generate_hold_for_each_of_several_datasets_and_no_longer(tmp_path):
    rows, lengths = causal_rows(4), []

    def noted(prediction):
        made_here = prediction.predictions != hf_models.PAD
        lengths.append(int(made_here.any(0).nonzero()[0].max()))
        return {}

    args = arguments(tmp_path, poise.Seq2SeqTrainingArguments, predict_with_generate=True)
    trainer = poise.Seq2SeqTrainer(made("t5"), args, collate, compute_metrics=noted)
    trainer.evaluate({"one": rows, "other": rows}, max_new_tokens=2, min_new_tokens=2)
    trainer.evaluate(rows, min_new_tokens=5)
    assert lengths[0] == lengths[1] == 2 and lengths[2] >= 5


def test_the_loss_is_the_exact_one(tmp_path):
    # Theirs is a mean over batches of 4 and 2 rows.
    rows, model = causal_rows(6), made("t5")
    _, (_, metrics) = both(tmp_path, rows, model=model)
    whole = poise.Trainer(model, arguments(tmp_path), collate, eval_dataset=rows).evaluate()
    assert metrics["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)


def test_it_trains_as_the_trainer_does_and_takes_arguments_of_generate(tmp_path):
    rows = causal_rows(8)
    plain = poise.Trainer(made("t5"), arguments(tmp_path), collate, train_dataset=rows)
    plain.train()
    args = arguments(tmp_path, poise.Seq2SeqTrainingArguments, predict_with_generate=True)
    trainer = poise.Seq2SeqTrainer(made("t5"), args, collate, train_dataset=rows)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert (trainer.predict(rows, max_new_tokens=3).predictions[:, 4:] == hf_models.PAD).all()
    with pytest.raises(poise.Error, match="sortish_sampler"):
        poise.Seq2SeqTrainingArguments(sortish_sampler=True)
