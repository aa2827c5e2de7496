"""Trainer.predict, compute_metrics and model_init, against the model called by hand."""

import json

import numpy
import poise
import pytest
import torch
from poise import prediction
from tiny_models import same_bits, tiny
from torch import nn


class Classifier(nn.Module):
    """Returns the loss and the logits in one of the usual forms; only logits without labels."""

    def __init__(self, form="dict"):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.layer, self.dropout = form, nn.Linear(3, 4), nn.Dropout(0.5)

    def forward(self, x, labels=None):
        logits = self.dropout(self.layer(x))
        if labels is None:
            return {"tuple": (logits,), "dict": {"logits": logits}, "tensor": logits}[self.form]
        loss = nn.functional.cross_entropy(logits, labels)
        both = {"loss": loss, "logits": logits, "past_key_values": logits[:1]}
        return {"tuple": (loss, logits), "dict": both, "tensor": loss}[self.form]


def samples(size=11, labels=True):
    generator = torch.Generator().manual_seed(3)
    rows = [{"x": torch.randn(3, generator=generator)} for _ in range(size)]
    for i, row in enumerate(rows):
        if labels:
            row["labels"] = torch.tensor(i % 4)
    return rows


def arguments(folder, **changes):
    base = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return poise.TrainingArguments(str(folder), **{**base, **changes})


def by_hand(model, rows):
    with torch.no_grad():
        return model.eval().layer(torch.stack([row["x"] for row in rows])).numpy()


def accuracy(pair):
    logits, labels = pair
    assert pair[0] is pair.predictions is logits
    return {"accuracy": (logits.argmax(-1) == labels).mean(), "eval_rows": len(labels)}


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_predictions_are_the_outputs_in_order(tmp_path, form):
    model, rows = Classifier(form).train(), samples()
    trainer = poise.Trainer(model, arguments(tmp_path), compute_metrics=accuracy)
    output = trainer.predict(rows)
    assert model.dropout.training  # modes are put back
    expected = by_hand(Classifier(form), rows)
    numpy.testing.assert_allclose(output.predictions, expected, rtol=1e-6)
    assert output.label_ids.tolist() == [i % 4 for i in range(11)]
    labels = torch.tensor(output.label_ids)
    loss = nn.functional.cross_entropy(torch.tensor(expected), labels).item()
    assert output.metrics["test_loss"] == pytest.approx(loss, rel=1e-6)
    hits = (expected.argmax(-1) == output.label_ids).mean()
    assert output.metrics["test_accuracy"] == pytest.approx(hits)
    assert output.metrics["test_eval_rows"] == 11


@pytest.mark.parametrize("form", ["dict", "tuple", "tensor"])
def test_samples_without_labels_give_predictions_alone(tmp_path, form):
    rows = samples(labels=False)
    trainer = poise.Trainer(Classifier(form), arguments(tmp_path), compute_metrics=accuracy)
    output = trainer.predict(rows, metric_key_prefix="new")
    numpy.testing.assert_allclose(output.predictions, by_hand(Classifier(), rows), rtol=1e-6)
    assert output.label_ids is None and list(output.metrics) == [
        "new_runtime",
        "new_samples_per_second",
        "new_steps_per_second",
    ]


def test_compute_metrics_is_part_of_every_evaluation(tmp_path):
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2)
    rows = samples()
    trainer = poise.Trainer(
        Classifier(), args, train_dataset=rows, eval_dataset=rows, compute_metrics=accuracy
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval_accuracy" in line]
    assert [line["step"] for line in evaluated] == [2, 4]
    assert evaluated[-1]["eval_rows"] == 11  # a name with the prefix keeps it
    hits = (by_hand(trainer.model, rows).argmax(-1) == numpy.arange(11) % 4).mean()
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(hits)
    plain = poise.Trainer(trainer.model, args, train_dataset=rows, eval_dataset=rows).evaluate()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


def test_predicting_during_a_run_changes_no_bit(tmp_path):
    rows = samples()

    def trained(**options):
        args = arguments(tmp_path, eval_strategy="steps", eval_steps=1)
        model = Classifier()
        poise.Trainer(model, args, train_dataset=rows, eval_dataset=rows, **options).train()
        return model

    assert same_bits(trained(), trained(compute_metrics=accuracy))


def test_logits_may_be_reduced_batch_by_batch(tmp_path):
    sizes = []

    def classes(logits, labels):
        sizes.append((len(logits), len(labels)))
        return logits.argmax(-1)

    rows = samples()
    trainer = poise.Trainer(
        Classifier(),
        arguments(tmp_path),
        preprocess_logits_for_metrics=classes,
        compute_metrics=lambda pair: {"accuracy": (pair.predictions == pair.label_ids).mean()},
    )
    output = trainer.predict(rows)
    assert sizes == [(4, 4), (4, 4), (3, 3)]
    expected = by_hand(Classifier(), rows).argmax(-1)
    assert (output.predictions == expected).all()


def test_compute_loss_func_sees_outputs_that_are_all_predictions(tmp_path):
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Classifier("tensor")

        def forward(self, x):
            return self.inner(x)

    rows = samples()
    trainer = poise.Trainer(
        Scores(), arguments(tmp_path), compute_loss_func=nn.functional.cross_entropy
    )
    output = trainer.predict(rows)
    numpy.testing.assert_allclose(output.predictions, by_hand(Classifier(), rows), rtol=1e-6)
    assert output.metrics["test_loss"] > 0


def test_batches_of_other_lengths_are_padded_as_in_transformers():
    arrays = prediction._Arrays()
    arrays.add((torch.ones(2, 3, 5, dtype=torch.bfloat16), torch.zeros(2)))
    arrays.add((torch.full((1, 4, 5), 2.0), torch.ones(1)))
    first, second = arrays.joined()
    assert first.shape == (3, 4, 5) and first.dtype == numpy.float32
    assert (first[:2, :3] == 1).all() and (first[:2, 3] == -100).all() and (first[2] == 2).all()
    assert second.tolist() == [0, 0, 1]


class Output:
    """As a model's output object that is no dictionary."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    "outputs, count",
    [
        ({"loss": torch.ones(()), "logits": torch.ones(2, 3)}, 1),
        ({"logits": torch.ones(2, 3), "hidden": (torch.ones(2), torch.ones(2)), "none": None}, 2),
        (Output(loss=torch.ones(()), logits=torch.ones(2, 3)), 1),
        ((torch.ones(()), torch.ones(2, 3), torch.ones(2)), 2),
        (torch.ones(()), 0),
        ({"loss": torch.ones(())}, 0),
    ],
)
def test_what_of_the_outputs_is_a_prediction(outputs, count):
    found = prediction.predictions_in(Classifier(), outputs)
    assert (0 if found is None else len(found) if isinstance(found, tuple) else 1) == count


def test_what_a_model_says_to_ignore_is_ignored():
    model = Classifier()
    model.config = Output(keys_to_ignore_at_inference=["hidden"])
    outputs = {"logits": torch.ones(2, 3), "hidden": torch.ones(2, 3)}
    assert prediction.predictions_in(model, outputs) is outputs["logits"]


@pytest.mark.parametrize(
    "form, labels, metrics, words",
    [
        ("tensor", True, accuracy, "returned only its loss"),
        ("dict", True, lambda pair: 3, "compute_metrics returned int"),
        ("labels inside", False, accuracy, "compute_metrics needs labels"),
    ],
)
def test_metrics_that_cannot_be_computed(tmp_path, form, labels, metrics, words):
    class Inside(Classifier):
        def forward(self, x):
            return super().forward(x, torch.zeros(len(x), dtype=torch.int64))

    model = Inside() if form == "labels inside" else Classifier(form)
    trainer = poise.Trainer(
        model, arguments(tmp_path), eval_dataset=samples(labels=labels), compute_metrics=metrics
    )
    with pytest.raises(poise.Error, match=words):
        trainer.evaluate()


# The model, and what is refused.


@pytest.mark.parametrize("takes_trial", [False, True])
def test_model_init_makes_the_same_model_anew(tmp_path, takes_trial):
    made = []

    def init():
        made.append(nn.Linear(3, 4))  # drawn from the global generator
        return Wrapped(made[-1])

    class Wrapped(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, labels):
            return nn.functional.cross_entropy(self.layer(x), labels)

    trainer = poise.Trainer(
        args=arguments(tmp_path),
        train_dataset=samples(),
        model_init=(lambda trial: init()) if takes_trial else init,
    )
    losses = [trainer.train().training_loss]
    torch.rand(7)
    losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1]
    assert len(made) == 3 and trainer.model.layer is made[-1]
    assert same_bits(made[1], made[2]) and not same_bits(made[0], made[1])


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "no model given"),
        ({"model": tiny(), "model_init": tiny}, "both model and model_init given"),
        ({"model": lambda x: x}, "the model is function"),
        ({"model_init": lambda: 3}, "model_init returned int"),
    ],
)
def test_choices_that_cannot_be_kept(options, words):
    with pytest.raises(poise.Error, match=words):
        poise.Trainer(**options)


def test_no_optimizers_are_no_error():
    assert poise.Trainer(tiny(), optimizers=(None, None)).model is not None


def test_metrics_may_hold_what_json_has_no_words_for(tmp_path):
    confusion = numpy.eye(2, dtype=numpy.int64)

    def metrics(pair):
        nested = {"rows": numpy.int64(3), "parts": (numpy.float32(0.5), torch.tensor(2))}
        return {"confusion": confusion, "nested": nested, "mean": torch.tensor([0.5])}

    class Telling(poise.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            outputs = model(**inputs)
            self.log({"seen": outputs["loss"].detach()})
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, save_steps=2)
    trainer = Telling(
        Classifier(),
        args,
        train_dataset=samples(),
        eval_dataset=samples(),
        compute_metrics=metrics,
    )
    trainer.train()
    assert trainer.evaluate()["eval_confusion"] is confusion
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    told = {"rows": 3, "parts": [0.5, 2]}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    written = [*map(json.loads, lines), *trainer.state.log_history]
    written = [line for line in written if "eval_nested" in line]
    written.append(json.loads((tmp_path / "eval_results.json").read_text()))
    for line in written:
        assert line["eval_nested"] == told and line["eval_mean"] == 0.5
        assert line["eval_confusion"] == [[1, 0], [0, 1]]
    assert len(written) == 7 and any("seen" in line for line in trainer.state.log_history)
