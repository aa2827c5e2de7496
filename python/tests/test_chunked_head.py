"""TrainingArguments(loss_chunk_tokens=...): the same training, without whole logits, or a refusal."""

import poise
import pytest
import torch
import torch.nn.functional as F
from poise.chunked_head import find_head
from poise.models import ByteGPT
from tiny_models import TinyForCausalLM, batch, tiny
from torch import nn

CLASSES = 2000


class WideForCausalLM(nn.Module):
    """A causal model whose logits are most of its memory."""

    def __init__(self, extra=None, bias=True, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.extra = extra
        self.embedding = nn.Embedding(CLASSES, 8)
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(8, CLASSES, bias=bias)

    def forward(self, input_ids, labels):
        hidden = self.dropout(self.embedding(input_ids))
        if self.extra == "bypass":
            logits = F.linear(hidden, self.lm_head.weight, self.lm_head.bias)
        else:
            logits = self.lm_head(hidden)
        if self.extra == "cap":
            logits = 30 * torch.tanh(logits / 30)
        if self.extra == "scale":
            logits = logits * 0.5
        smoothing = 0.1 if self.extra == "smoothing" else 0.0
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing
        )
        if self.extra == "term":
            loss = loss + 0.01 * hidden.square().mean()
        return {"loss": loss, "logits": logits}


def rows(classes=CLASSES, size=8, length=40, masked=True):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, classes, (size, length), generator=generator)
    hidden = torch.rand(size, length, generator=generator) < (0.3 if masked else 0)
    return [
        {"input_ids": i, "labels": i.masked_fill(h, -100)} for i, h in zip(ids, hidden, strict=True)
    ]


def arguments(folder, **changes):
    base = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return poise.TrainingArguments(str(folder), **{**base, **changes})


def train(folder, model, data, **changes):
    trainer = poise.Trainer(model, arguments(folder, **changes), train_dataset=data)
    output = trainer.train()
    return output.training_loss, output.metrics, trainer


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize("make, data", [
    (WideForCausalLM, rows()),
    (lambda: WideForCausalLM(bias=False, dropout=0.2), rows(masked=False)),
    (tiny, [{name: t[i] for name, t in batch(8, 12, seed=1, masked=0.3).items()} for i in range(8)]),
])  # fmt: skip
def test_is_the_training_with_whole_logits(tmp_path, make, data, chunk):
    (loss, whole, _), (chunked_loss, chunked, trainer) = (
        train(tmp_path, make(), data, loss_chunk_tokens=size) for size in (0, chunk)
    )
    assert chunked_loss == pytest.approx(loss, rel=1e-5)
    assert chunked["train_tokens"] == whole["train_tokens"]
    assert all(module.training for module in trainer.model.modules())


def test_logits_are_not_held(tmp_path):
    logits = 4 * 4 * 40 * CLASSES  # bytes of one micro-batch's
    peaks = [
        train(tmp_path, WideForCausalLM(), rows(), loss_chunk_tokens=size)[1]["peak_bytes"]
        for size in (0, 16)
    ]
    assert peaks[0] - peaks[1] > logits


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_autocast(tmp_path, precision):
    (loss, _, _), (chunked_loss, _, _) = (
        train(tmp_path, WideForCausalLM(), rows(), loss_chunk_tokens=size, **{precision: True})
        for size in (0, 16)
    )
    assert chunked_loss == pytest.approx(loss, rel=1e-2)


def test_dropout_draws_the_same_masks(tmp_path):
    """The check on the first batch leaves no trace in the random streams."""
    losses = [
        train(tmp_path, WideForCausalLM(dropout=0.3), rows(), loss_chunk_tokens=16, seed=seed)[0]
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    whole = train(tmp_path, WideForCausalLM(dropout=0.3), rows(), seed=1)[0]
    assert losses[0] == pytest.approx(whole, rel=1e-5)


class ByteModel(nn.Module):
    """The byte-level GPT as a Trainer's model: (inputs, targets) -> loss."""

    def __init__(self):
        super().__init__()
        self.gpt = ByteGPT(layers=2, width=16, heads=2, sequence_length=12)

    def forward(self, inputs, targets):
        return F.cross_entropy(self.gpt(inputs).flatten(0, 1), targets.flatten())


def test_byte_gpt_over_a_corpus_with_recomputed_blocks(tmp_path):
    (tmp_path / "text").write_bytes(bytes(i * i % 251 for i in range(600)))
    data = poise.data.byte_corpus(tmp_path / "text", 12)
    assert find_head(ByteModel())[0] == "gpt.head"
    (loss, _, _), (chunked_loss, _, trainer) = (
        train(tmp_path, ByteModel(), data, gradient_checkpointing=size > 0, loss_chunk_tokens=size)
        for size in (0, 5)
    )
    assert chunked_loss == pytest.approx(loss, rel=1e-5)
    # Evaluation goes by pieces too, predictions with whole logits.
    whole = poise.Trainer(trainer.model, arguments(tmp_path), eval_dataset=data).evaluate()
    assert poise.Trainer(
        trainer.model, arguments(tmp_path, loss_chunk_tokens=5), eval_dataset=data
    ).evaluate()["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)


def test_metrics_get_whole_logits(tmp_path):
    trainer = poise.Trainer(
        WideForCausalLM(),
        arguments(tmp_path, loss_chunk_tokens=5),
        eval_dataset=rows(),
        compute_metrics=lambda pair: {"classes": pair.predictions.shape[-1]},
    )
    assert trainer.evaluate()["eval_classes"] == CLASSES


@pytest.mark.parametrize("extra", ["cap", "scale", "smoothing", "term", "bypass"])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_a_forward_that_does_more_is_refused(tmp_path, extra, precision):
    words = "does not call its head" if extra == "bypass" else "does more than a mean cross-entropy"
    with pytest.raises(poise.Error, match=words):
        train(tmp_path, WideForCausalLM(extra), rows(), loss_chunk_tokens=16, **precision)


def without_head():
    model = WideForCausalLM()
    model.out, model.lm_head = model.lm_head, None
    return model


def with_two_heads():
    model = WideForCausalLM()
    model.head = nn.Linear(2, 2)
    return model


def with_a_hook():
    model = WideForCausalLM()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output)
    return model


def with_another_head():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = WideForCausalLM()
    model.lm_head = Scaled(8, CLASSES)
    return model


@pytest.mark.parametrize(
    "make, words",
    [
        (without_head, "it has none"),
        (with_two_heads, "it has lm_head, head"),
        (with_a_hook, "lm_head has hooks"),
        (with_another_head, "lm_head is Scaled"),
        (lambda: torch.compile(WideForCausalLM(), backend="eager"), "compiled as a whole"),
    ],
)
def test_heads_that_cannot_be_used(tmp_path, make, words):
    with pytest.raises(poise.Error, match=f"loss_chunk_tokens cannot be used: .*{words}"):
        poise.Trainer(make(), arguments(tmp_path, loss_chunk_tokens=4), train_dataset=rows())


def test_batches_and_options_that_do_not_fit(tmp_path):
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows()]

    class NoLabels(WideForCausalLM):
        def forward(self, input_ids):
            return super().forward(input_ids, input_ids)

    with pytest.raises(poise.Error, match="no labels that name classes"):
        train(tmp_path, NoLabels(), unlabelled, loss_chunk_tokens=4)
    with pytest.raises(poise.Error, match="compute_loss_func, which gets whole logits"):
        poise.Trainer(
            WideForCausalLM(),
            arguments(tmp_path, loss_chunk_tokens=4),
            compute_loss_func=F.cross_entropy,
        )


class NextWord(TinyForCausalLM):
    """Shifts where its name does not tell."""


def test_a_wrong_shift_is_noticed(tmp_path):
    with pytest.raises(poise.Error, match="does more than"):
        train(tmp_path, NextWord(), rows(13), loss_chunk_tokens=4)


# transformers, where it is installed.


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 300, "max_position_embeddings": 64}
    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, **size}  # fmt: skip
    torch.manual_seed(0)
    if kind == "gpt2":  # tied embeddings
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=300, n_positions=64
        )
    elif kind == "llama":
        config = transformers.LlamaConfig(**llama)
    else:
        config = transformers.Gemma2Config(head_dim=8, **llama)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_causal_models_of_transformers(tmp_path, kind):
    data = rows(300)
    (loss, whole, _), (chunked_loss, chunked, _) = (
        train(tmp_path, hugging_face(kind), data, loss_chunk_tokens=size) for size in (0, 9)
    )
    assert chunked_loss == pytest.approx(loss, rel=1e-4)
    assert chunked["train_tokens"] == whole["train_tokens"]


def test_a_model_of_transformers_that_caps_its_logits(tmp_path):
    with pytest.raises(poise.Error, match="does more than a mean cross-entropy"):
        train(tmp_path, hugging_face("gemma2"), rows(300), loss_chunk_tokens=9)
