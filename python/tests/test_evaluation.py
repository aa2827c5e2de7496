"""The mean loss of an evaluation: the sums of numbers read one by one, without waiting for each."""

from __future__ import annotations

import pytest
import torch
from poise import evaluation
from poise.evaluation import MeanLoss
from poise.loss import Loss, Term

KINDS = ["mean", "sum", "per_token"]


def losses(kind, count_of):
    generator = torch.Generator().manual_seed(3)
    for i in range(40):
        value = torch.randn(5 if kind == "per_token" else (), generator=generator)
        count = count_of(i % 7)  # 0: a masked batch, whose mean is NaN
        if count == 0 and kind == "mean":
            value = torch.tensor(torch.nan)
        yield Loss(
            value, count, kind, [Term(torch.rand((), generator=generator), i % 3, weight=0.3)]
        )


def read_at_once(kind, count_of):
    rows = []
    for loss in losses(kind, count_of):
        count, row = float(loss.count), (0.0, 0.0)
        if count > 0:
            value = float(loss.value.double().sum())
            row = (value * count if kind == "mean" else value, count)
        (term,) = loss.terms
        count = float(term.count)
        row += (float(term.value.double()) * term.weight * count if count else 0.0, count)
        rows.append(row)
    return rows


@pytest.mark.parametrize("count_of", [int, float, torch.tensor])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_numbers_read_one_by_one(kind, count_of, monkeypatch):
    reads, numbers = [], evaluation._numbers
    monkeypatch.setattr(evaluation, "batches_read_at_once", lambda device: 16)
    monkeypatch.setattr(
        evaluation, "_numbers", lambda given: reads.append(len(given)) or numbers(given)
    )
    mean = MeanLoss()
    for i, loss in enumerate(losses(kind, count_of)):
        mean.add(loss)
        assert len(reads) == 2 * ((i + 1) // 16)  # values and counts
    assert mean.rows == read_at_once(kind, count_of)
    assert mean.metrics("eval")["eval_tokens"] == sum(row[1] for row in mean.rows)


def test_a_loss_without_a_count_is_one():
    mean = MeanLoss()
    mean.add(Loss(torch.tensor(2.0)))
    mean.add(Loss(torch.tensor([1.0, 2.0, 3.0]), kind="per_token"))
    assert mean.rows == [(2.0, 1.0), (6.0, 3.0)]
