"""A batch that a model cannot take is named: which entry, its type, shape and values, and what to do."""

import re

import poise
import pytest
import torch
import transformers
from hf_models import VOCABULARY, causal_rows, made, text_rows
from poise import wrong_batch
from test_hf_trainer import arguments
from tiny_models import batch, tiny
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def changed(rows, **functions):
    return [{k: functions.get(k, lambda v: v)(v) for k, v in row.items()} for row in rows]


def train(folder, model, rows, kind=poise.Trainer, changes=None, **more):
    kind(model, arguments(folder, **(changes or {})), train_dataset=rows, **more).train()


class OwnLoss(poise.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return getattr(outputs, "loss", outputs)


def regression():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_labels=1,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def floats(labels):
    return labels.float()


CASES = {
    "floats for words": (
        lambda: made("gpt2"),
        lambda: changed(causal_rows(8), labels=floats),
        r"labels are float32 of shape \(2, 12\).*as torch.int64.*call .long\(\) \(RuntimeError: ",
    ),
    "int32 for words": (
        lambda: made("gpt2"),
        lambda: changed(causal_rows(8), labels=lambda v: v.int()),
        r"labels are int32 of shape \(2, 12\)",
    ),
    "floats for classes": (
        lambda: made("bert"),
        lambda: changed(text_rows(8), labels=floats),
        r"labels are float32 of shape \(2,\): a model that chooses among classes",
    ),
    "integers for a regression": (
        regression,
        lambda: changed(text_rows(8)),
        r"labels are int64 of shape \(2,\), and BertForSequenceClassification with num_labels 1",
    ),
    "labels of another length": (
        lambda: made("gpt2"),
        lambda: changed(causal_rows(8), labels=lambda v: v[:-2]),
        r"labels are int64 of shape \(2, 10\) beside input_ids \(2, 12\)",
    ),
    "a word that a model of one's own does not know": (
        tiny,
        lambda: changed([batch(1, 12, i) for i in range(8)], labels=lambda v: v[0] + 90, input_ids=lambda v: v[0]),
        r"input_ids has 0 to 12, labels has 90 to 102; numbers begin at 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [poise.Trainer, OwnLoss])
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_names_wrong_labels(tmp_path, case, kind):
    model, rows, words = CASES[case]
    with pytest.raises(poise.Error, match=r"\[trainer\] .*" + words) as caught:
        train(tmp_path, model(), rows(), kind)
    regression = case == "integers for a regression"  # looked at before
    assert (caught.value.__cause__ is None) == regression


def test_labels_beside_a_chunked_head_are_named(tmp_path):
    changes = {"loss_chunk_tokens": 8}
    rows = changed(causal_rows(8), labels=floats)
    with pytest.raises(poise.Error, match="no labels that name classes: they are torch.float32"):
        train(tmp_path, made("gpt2"), rows, changes=changes)


def test_an_evaluation_names_them_too(tmp_path):
    rows = changed(causal_rows(8), labels=floats)
    trainer = poise.Trainer(made("gpt2"), arguments(tmp_path), eval_dataset=rows)
    with pytest.raises(poise.Error, match="labels are float32"):
        trainer.evaluate()


def test_compute_loss_func_is_told_too(tmp_path):
    def loss(outputs, labels):
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    with pytest.raises(poise.Error, match=r"labels are float32 of shape \(2, 12\)"):
        train(
            tmp_path, made("gpt2"), changed(causal_rows(8), labels=floats), compute_loss_func=loss
        )


def test_a_loop_of_ones_own_names_them():
    rows = causal_rows(2)
    ids = torch.stack([row["input_ids"] for row in rows])
    model = made("gpt2")
    wrapped = poise.wrap(model, torch.optim.AdamW(model.parameters())).model
    with pytest.raises(poise.Error, match=r"\[loop\] labels are float32 of shape \(2, 12\)"):
        wrapped(input_ids=ids, labels=ids.float())
    engine = poise.Engine(made("gpt2"), {})
    with pytest.raises(
        poise.Error, match=r"\[engine\] labels have \d+, and the model knows 0 to 30"
    ):
        engine.step([{"input_ids": ids, "labels": ids + 90}])
    assert engine.step([{"input_ids": ids, "labels": ids}]).applied


def test_errors_of_another_kind_stay_as_they_are(tmp_path):
    class Fails(nn.Module):
        def __init__(self, error):
            super().__init__()
            self.layer, self.error = nn.Linear(2, 2), error

        def forward(self, input_ids, labels):
            raise self.error

    rows = causal_rows(4)
    for error in (
        ValueError("of my own"),
        KeyError("x"),
        RuntimeError("expected scalar type Long but found Float"),  # but labels are integers
        IndexError("list index out of range"),
        torch.OutOfMemoryError("out of range"),
    ):
        with pytest.raises(type(error), match=re.escape(str(error))) as caught:
            train(tmp_path, Fails(error), rows)
        assert caught.value is error or isinstance(error, torch.OutOfMemoryError)


def test_a_gpu_s_assert_is_explained():
    said = "CUDA error: device-side assert triggered"
    with pytest.raises(poise.Error, match="a label or a token number.*use_cpu=True"):
        with wrong_batch.asserts_explained():
            raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="^another$"):
        with wrong_batch.asserts_explained():
            raise RuntimeError("another")


# Samples that make no batch.


def ragged(make):
    return [{"input_ids": make(range(n, 12)), "labels": make(range(n, 12))} for n in (0, 3, 5, 7)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            list,
            "'input_ids' has samples of .* numbers, which make no tensor; give processing_class",
        ),
        (torch.tensor, r"'input_ids' has samples of shape \(\d+,\) and of shape \(\d+,\), which"),
        (lambda r: torch.tensor(r).numpy(), r"'input_ids' has samples of shape \(\d+,\) and of"),
    ],
    ids=["lists", "tensors", "arrays"],
)
def test_samples_of_unequal_length_are_named(tmp_path, make, words):
    with pytest.raises(poise.Error, match=words):
        train(tmp_path, made("gpt2"), ragged(make))


def test_so_they_are_in_a_worker(tmp_path):
    with pytest.raises(poise.Error, match=r"'input_ids' has samples of shape"):
        train(tmp_path, made("gpt2"), ragged(torch.tensor), changes={"dataloader_num_workers": 1})


def test_samples_that_are_tuples_too(tmp_path):
    rows = [(torch.zeros(3 + i), torch.tensor(0)) for i in range(4)]
    with pytest.raises(poise.Error, match=r"there are samples of shape \(\d,\) and of shape"):
        train(tmp_path, nn.Linear(2, 2), rows)


def test_samples_with_other_keys_are_named(tmp_path):
    rows = causal_rows(4)
    for row in rows[1:]:
        del row["labels"]
    changes = {"train_sampling_strategy": "sequential"}
    with pytest.raises(
        poise.Error, match="a sample has input_ids, and another of its batch input_ids, labels"
    ):
        train(tmp_path, made("gpt2"), rows, changes=changes)


class Tokenizer:
    """Pads the columns that it knows, as transformers' do."""

    def pad(self, features, return_tensors):
        longest = max(len(feature["input_ids"]) for feature in features)
        rows = [
            feature["input_ids"] + [0] * (longest - len(feature["input_ids"]))
            for feature in features
        ]
        try:
            labels = torch.tensor([feature["labels"] for feature in features])
        except ValueError as error:
            raise ValueError(
                "Unable to create tensor, you should probably activate padding"
            ) from error
        return {"input_ids": torch.tensor(rows), "labels": labels}


def test_labels_that_a_tokenizer_does_not_pad_are_named(tmp_path):
    with pytest.raises(poise.Error, match="'labels' has samples of .*DataCollatorForSeq2Seq"):
        train(tmp_path, made("gpt2"), ragged(list), processing_class=Tokenizer())


# On the way to a GPU.


def check(model, batch, makes_loss=True):
    wrong_batch.Numbers(model, ("labels",), makes_loss=makes_loss).check(batch)


def test_numbers_that_a_gpu_would_end_for_are_named_before():
    gpt, ids = made("gpt2"), torch.arange(6).reshape(2, 3)
    labels = torch.tensor([[-100, 1, VOCABULARY - 1]])
    check(gpt, {"input_ids": ids, "labels": labels})
    last = VOCABULARY - 1
    for name, wrong in [
        ("input_ids", VOCABULARY),
        ("input_ids", -100),
        ("labels", VOCABULARY),
        ("labels", -1),
    ]:
        batch = {"input_ids": ids, "labels": labels, name: torch.tensor([[0, wrong]])}
        words = rf"\[trainer\] {name} have {wrong}, and the model knows 0 to {last}"
        with pytest.raises(poise.Error, match=words):
            check(gpt, batch)
    bert = made("bert")
    check(bert, {"input_ids": ids, "labels": torch.tensor([0, bert.config.num_labels - 1])})
    with pytest.raises(poise.Error, match=f"labels have {bert.config.num_labels}"):
        check(bert, {"input_ids": ids, "labels": torch.tensor([0, bert.config.num_labels])})


def test_what_a_model_may_mean_otherwise_is_not_looked_at():
    ids, wrong = torch.arange(6).reshape(2, 3), torch.tensor([[0, 1000]])
    gpt = made("gpt2")
    check(gpt, {"input_ids": ids, "labels": wrong}, makes_loss=False)  # a loss of one's own
    check(gpt, {"input_ids": ids.to("meta"), "labels": wrong.to("meta")})  # on a GPU already
    check(gpt, (wrong, wrong), makes_loss=False)
    check(tiny(), {"input_ids": wrong, "labels": wrong})  # a model of one's own
    gpt.resize_token_embeddings(1001)
    gpt.config.vocab_size = VOCABULARY  # which is not what decides
    check(gpt, {"input_ids": wrong})
    check(regression(), {"input_ids": ids, "labels": torch.tensor([7.0, 9.0])})
