"""Datasets of the package datasets as train_dataset and eval_dataset: tables and streams, their formats, and what has the
same protocol without it."""

import json
import sys
from pathlib import Path

import poise
import pytest
import rank_processes
import torch
import transformers
from hf_models import VOCABULARY, causal_rows, made, text_rows
from test_hf_trainer import arguments, losses, reference, windows_of, without_strategy

pytestmark = pytest.mark.usefixtures("one_thread")


def columns(rows):
    """With one more, which no model takes."""
    found = {name: [row[name].tolist() for row in rows] for name in rows[0]}
    return {**found, "text": [f"row {i}" for i in range(len(rows))]}


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = pytest.importorskip("datasets", reason="no datasets")
    found.disable_progress_bars()
    return found


def trained(dataset, folder, name="gpt2", **changes):
    trainer = poise.Trainer(made(name), arguments(folder, **changes), train_dataset=dataset)
    trainer.train()
    return trainer


# Without the package.


class Table:
    """The protocol of datasets.Dataset; counts how it is read."""

    def __init__(self, rows):
        self._rows = rows
        self.column_names = list(rows)
        self.features = dict.fromkeys(rows)
        self.lists = 0

    def __len__(self):
        return len(next(iter(self._rows.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._rows[key]
        return {name: values[int(key)] for name, values in self._rows.items()}

    def __getitems__(self, keys):
        self.lists += 1
        return [self[key] for key in keys]


class Stream(torch.utils.data.IterableDataset):
    """That of datasets.IterableDataset: no length, and an epoch to be told."""

    column_names = features = None

    def __init__(self, rows):
        self._table, self.epochs = Table(rows), []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return (self._table[i] for i in range(len(self._table)))


def test_what_has_the_protocol_of_a_table_trains_as_its_rows(tmp_path):
    rows = causal_rows(20)
    table = Table(columns(rows))
    trainer = trained(table, tmp_path)
    _, seen = reference("gpt2", made("gpt2"), windows_of(rows))
    assert losses(trainer) == pytest.approx(seen, rel=2e-5)
    assert table.lists == 10  # a micro-batch at a time
    whole = poise.Trainer(made("gpt2"), arguments(tmp_path), eval_dataset=rows).evaluate()
    ours = poise.Trainer(made("gpt2"), arguments(tmp_path), eval_dataset=table).evaluate()
    assert ours["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)


def test_what_has_the_protocol_of_a_stream_is_told_its_epochs(tmp_path):
    stream = Stream(columns(causal_rows(16)))
    trainer = trained(stream, tmp_path, max_steps=5)
    assert trainer.state.global_step == 5 and stream.epochs[:3] == [0, 1, 2]
    _, seen = reference("gpt2", made("gpt2"), windows_of(causal_rows(16)))
    assert losses(trainer)[0] == pytest.approx(seen[0], rel=2e-5)


def test_several_datasets_by_name_are_no_train_dataset(tmp_path):
    several = {"train": Table(columns(causal_rows(8))), "test": Table(columns(causal_rows(4)))}
    with pytest.raises(
        poise.Error, match=r'train_dataset is a dict of train, test; give .*"train"'
    ):
        trained(several, tmp_path)


# With it.


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_table_in_any_format_trains_as_its_rows(form, datasets, tmp_path):
    rows = causal_rows(20)
    dataset = datasets.Dataset.from_dict(columns(rows)).with_format(form)
    _, seen = reference("gpt2", made("gpt2"), windows_of(rows))
    assert losses(trained(dataset, tmp_path)) == pytest.approx(seen, rel=2e-5)


def test_set_format_with_columns_and_a_transform_work(datasets, tmp_path):
    rows = causal_rows(8)
    _, seen = reference("gpt2", made("gpt2"), windows_of(rows))
    dataset = datasets.Dataset.from_dict(columns(rows))
    dataset.set_format("torch", columns=["input_ids", "labels"])
    assert losses(trained(dataset, tmp_path)) == pytest.approx(seen, rel=2e-5)
    dataset = datasets.Dataset.from_dict({"row": list(range(8))})
    # Reads a column that no model takes.
    dataset.set_transform(
        lambda batch: {name: [rows[i][name] for i in batch["row"]] for name in rows[0]}
    )
    assert losses(trained(dataset, tmp_path)) == pytest.approx(seen, rel=2e-5)


class Words:
    """A tokenizer of a few words."""

    pad_token_id = 0
    model_input_names = ["input_ids", "attention_mask"]

    def __call__(self, texts, truncation=True, max_length=12):
        ids = [
            [2 + len(word) % (VOCABULARY - 2) for word in text.split()][:max_length]
            for text in texts
        ]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}

    def pad(self, rows, return_tensors="pt", **_):
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {}
        for name in rows[0]:
            values = [list(row[name]) + [0] * (longest - len(row[name])) if name != "label" else row[name]
                      for row in rows]  # fmt: skip
            batch[name] = torch.tensor(values)
        return batch

    def save_pretrained(self, folder): ...


def test_a_mapped_and_split_table_of_texts_trains_and_evaluates_as_by_transformers(
    datasets, tmp_path
):
    source = Path(json.__file__).read_text(encoding="utf-8").split("\n")
    texts = [line for line in source if len(line.split()) > 2][:48]
    table = datasets.Dataset.from_dict({"text": texts, "label": [len(t) % 3 for t in texts]})
    words = Words()
    table = table.map(lambda batch: words(batch["text"]), batched=True)
    parts = table.train_test_split(test_size=0.25, seed=1)
    assert isinstance(parts, dict) and set(parts) == {"train", "test"}

    def accuracy(prediction):
        return {
            "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
        }

    seen = []
    for base in (transformers.Trainer, poise.Trainer):
        args = without_strategy(
            tmp_path / base.__module__, transformers.TrainingArguments, report_to="none",
            save_strategy="no", per_device_train_batch_size=36, gradient_accumulation_steps=1,
            num_train_epochs=4,
        )  # fmt: skip
        trainer = base(
            made("bert"), args, train_dataset=parts["train"], eval_dataset=parts["test"],
            data_collator=transformers.DataCollatorWithPadding(words), compute_metrics=accuracy,
        )  # fmt: skip
        trainer.train()
        metrics = trainer.evaluate()
        seen.append(
            (losses(trainer), metrics["eval_accuracy"], trainer.predict(parts["test"]).predictions)
        )
    (theirs, their_accuracy, their_logits), (ours, our_accuracy, our_logits) = seen
    assert ours == pytest.approx(theirs, rel=1e-4) and our_accuracy == their_accuracy
    assert abs(our_logits - their_logits).max() < 1e-3
    # All of a dictionary are evaluated by name.
    both = trainer.evaluate(parts)
    assert {"eval_train_loss", "eval_test_loss"} <= set(both)


@pytest.mark.parametrize("form", [None, "torch"])
def test_a_stream_needs_max_steps_and_trains_as_the_table(form, datasets, tmp_path):
    rows = causal_rows(16)
    stream = datasets.Dataset.from_dict(columns(rows)).to_iterable_dataset().with_format(form)
    with pytest.raises(poise.Error, match="has no length; set max_steps"):
        trained(stream, tmp_path)
    trainer = trained(stream, tmp_path, max_steps=2)
    _, seen = reference("gpt2", made("gpt2"), windows_of(rows))
    assert losses(trainer) == pytest.approx(seen, rel=2e-5)
    evaluated = poise.Trainer(made("gpt2"), arguments(tmp_path), eval_dataset=stream).evaluate()
    whole = poise.Trainer(made("gpt2"), arguments(tmp_path), eval_dataset=rows).evaluate()
    assert evaluated["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)


def test_a_stream_of_a_generator_mapped_and_shuffled_resumes(datasets, tmp_path):
    def generate():
        for row in text_rows(32):
            yield {"ids": row["input_ids"].tolist(), "label": int(row["labels"])}

    def stream():
        made_of = datasets.IterableDataset.from_generator(generate)
        mapped = made_of.map(lambda row: {"input_ids": row["ids"]}).shuffle(seed=3, buffer_size=8)
        return mapped.with_format("torch")

    options = {"max_steps": 6, "save_steps": 3, "name": "bert"}
    whole = trained(stream(), tmp_path / "whole", **options)
    args = arguments(tmp_path / "whole", max_steps=6, save_steps=3)
    again = poise.Trainer(made("bert"), args, train_dataset=stream())
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_found_balance_reads_a_table(datasets, tmp_path):
    dataset = datasets.Dataset.from_dict(columns(causal_rows(32)))
    args = poise.TrainingArguments(
        str(tmp_path), global_batch_size=8, memory_budget="64MiB", num_train_epochs=1, use_cpu=True,
        disable_tqdm=True, logging_steps=1, learning_rate=1e-2, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=dataset)
    trainer.train()
    _, seen = reference("gpt2", made("gpt2"), windows_of(causal_rows(32)))
    assert losses(trainer) == pytest.approx(seen, rel=2e-5)


def test_two_ranks_share_a_stream(datasets, tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    outputs = rank_processes.finish(rank_processes.start(command, 2))
    said = json.loads(outputs[0].strip().splitlines()[-1])
    _, seen = reference("gpt2", made("gpt2"), windows_of(causal_rows(16)))
    assert said == pytest.approx(seen, rel=2e-5)


if __name__ == "__main__":
    import datasets as package

    torch.set_num_threads(1)
    args = arguments(
        sys.argv[1], max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    rows = package.Dataset.from_dict(columns(causal_rows(16))).to_iterable_dataset()
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=rows)
    trainer.train()
    if trainer.is_world_process_zero():
        print(json.dumps(losses(trainer)))
