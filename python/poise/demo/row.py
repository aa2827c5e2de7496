"""One row of the demo in Python: `python -m poise.demo.row run.json`.

Does what `poise train run.json` does, with a torch.nn model and poise.Engine: the shortest example
of a training loop of one's own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import poise
from poise import _C, config
from poise.evaluation import evaluate
from poise.metrics_log import MetricsLog
from poise.models import ByteGPT


def train(path: Path) -> None:
    """Trains what the file describes; writes metrics.jsonl into its output folder."""
    run = config.read_config(path)
    settings = config.settings_of(run)
    length, data = settings["train"], settings["data"]
    model = ByteGPT(**_shape(settings["model"]), seed=settings["engine"]["seed"])

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> poise.Loss:
        inputs, targets = batch
        return poise.Loss(model.loss(inputs, targets), count=targets.numel())

    engine = poise.Engine(model, run)
    corpus = _C.ByteCorpus(data["train"], settings["model"]["sequence_length"], data["suffix"])
    training, validation = corpus.split(data["validation_fraction"])

    with MetricsLog(Path(length["output_dir"]) / "metrics.jsonl") as metrics:
        try:
            windows = iter(_windows(training, settings))
            for step in range(1, length["max_updates"] + 1):
                begin = time.perf_counter()
                result = engine.step(next(windows), loss_of)
                metrics.write(_line(step, result, time.perf_counter() - begin))
            batches = _validation_batches(validation, settings)
            metrics.write({"step": step, **evaluate(model, batches, loss_of, engine.forward_scope)})
        except (poise.Error, torch.OutOfMemoryError) as error:
            metrics.write({"error": str(error), "accounts": engine.memory()["at_peak"]})
            raise


def _shape(model: dict[str, Any]) -> dict[str, Any]:
    """ByteGPT's arguments are the section `model` but for the name of the model."""
    return {name: value for name, value in model.items() if name != "builtin"}


def _windows(corpus: Any, settings: dict[str, Any]) -> Any:
    batch, data = settings["batch"], settings["data"]
    return _C.WindowLoader(
        corpus,
        batch["micro_batch_size"],
        batch["accumulation"],
        seed=settings["engine"]["seed"],
        shuffle=data["shuffle"],
        run_on=True,
        prefetch=data["prefetch"],
    )


def _line(step: int, result: poise.StepResult, seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.lr,
        "loss_scale": result.loss_scale,
        "tokens_per_second": result.tokens / seconds,
        "peak_bytes": result.peak_bytes,
        "accounts": result.accounts,
        "host_bytes": result.host_bytes,
        "file_bytes": result.file_bytes,
        "status": str(result.status),
        "skipped": result.skipped,
    }


def _validation_batches(corpus: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """The first samples of the corpus, in pieces of a micro-batch."""
    size = settings["batch"]["micro_batch_size"]
    samples = min(len(corpus), size * settings["train"]["validation_batches"])
    for first in range(0, samples, size):
        yield corpus.batch(list(range(first, min(first + size, samples))))


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m poise.demo.row run.json", file=sys.stderr)
        return 2
    try:
        train(Path(arguments[0]))
    except (poise.Error, torch.OutOfMemoryError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
