"""transformers' Trainer and poise's on one model and the same data."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

import poise

UPDATES, WARM = 12, 2
ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_steps": UPDATES,
    "learning_rate": 3e-4,
    "weight_decay": 0.1,
    "logging_steps": UPDATES,
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 1,
    "train_sampling_strategy": "sequential",
}


def _model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _rows(count: int = 16 * UPDATES) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(256, (count, 128), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def _run(
    package: Any, rows: list[dict[str, torch.Tensor]], **extra: Any
) -> tuple[float, int, float]:
    """(median seconds of an update, peak bytes, first loss)."""
    import transformers

    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.begin)

    with tempfile.TemporaryDirectory() as folder:
        args = package.TrainingArguments(output_dir=folder, **ARGUMENTS, **extra)
        with poise.memory.Ledger() as ledger:
            trainer = package.Trainer(_model(), args, train_dataset=rows, callbacks=[Clock()])
            loss = trainer.train().training_loss
        peak = ledger.snapshot().peak_bytes
        if package is poise:
            peak = trainer.engine.memory()["peak_bytes"]
    return statistics.median(seconds[WARM:]), peak, loss


def hf_trainer(rounds: int = 3) -> Iterator[dict]:
    """transformers' time of an update over poise's, and poise's peak over transformers'; fp32, the
    same GPT-2 from a configuration, alternating runs."""
    try:
        import accelerate  # noqa: F401  (its Trainer needs it)
        import transformers
    except ImportError as error:
        raise poise.Error(
            f"[bench] hf_trainer needs {error.name}: pip install transformers accelerate"
        ) from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = _rows()
    theirs, ours = [], []
    for _ in range(rounds):
        theirs.append(_run(transformers, rows, save_strategy="no", report_to="none"))
        ours.append(_run(poise, rows, save_strategy="no"))
    seconds = {name: statistics.median(r[0] for r in runs) for name, runs in
               (("transformers", theirs), ("poise", ours))}  # fmt: skip
    yield {
        "figure": "hf_trainer",
        "value": round(seconds["transformers"] / seconds["poise"], 3),
        "aim": 1.0,
        "better": "higher",
        **{f"{name}_ms": round(1e3 * value, 2) for name, value in seconds.items()},
        "transformers_loss": theirs[0][2],
        "poise_loss": ours[0][2],
    }
    yield {
        "figure": "hf_trainer_peak",
        "value": round(ours[0][1] / theirs[0][1], 3),
        "aim": 1.0,
        "better": "lower",
        "transformers_bytes": theirs[0][1],
        "poise_bytes": ours[0][1],
    }
