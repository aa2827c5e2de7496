"""Models of transformers, made from small configurations: nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 31
LENGTH = 12
PAD = 0


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    """A mixture of experts, without the balance loss, which no split keeps the same."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH,
        num_local_experts=4, num_experts_per_tok=2, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the one that knows float64
    return transformers.MixtralForCausalLM(config)


def bert_classifier() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=LENGTH, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def causal_rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences of one length whose labels are masked, some more, some less."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(count):
        ids = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: (row * 5) % (LENGTH - 2)] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def text_rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences of one class each."""
    rows = causal_rows(count, seed)
    return [
        {"input_ids": row["input_ids"], "labels": torch.tensor(i % 3)} for i, row in enumerate(rows)
    ]


def image_rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, 8, 8, generator=generator)
    return [
        {"pixel_values": image + i % 3, "labels": torch.tensor(i % 3)}
        for i, image in enumerate(pixels)
    ]


MODELS: dict[str, tuple[Callable[[], Any], Callable[..., list]]] = {
    "gpt2": (gpt2, causal_rows),
    "llama": (llama, causal_rows),
    "mixtral": (mixtral, causal_rows),
    "bert": (bert_classifier, text_rows),
    "t5": (t5, causal_rows),
    "vit": (vit, image_rows),
}


def made(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name][0]()


def counted(name: str, row: dict[str, torch.Tensor]) -> int:
    """Labels of a row that the model's loss counts."""
    labels = row["labels"]
    if labels.dim() == 0:
        return 1
    shifted = name in ("gpt2", "llama", "mixtral")
    return int((labels[1 if shifted else 0 :] != -100).sum())
