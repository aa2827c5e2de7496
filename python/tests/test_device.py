"""Which GPU a rank takes, as told by its launcher and by what it sees."""

from __future__ import annotations

import poise
import pytest
import torch
from poise import ranks


def on_machine(monkeypatch, gpus, local, size=4):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ranks, "here", lambda: ranks.Here(local or 0, size, local))


@pytest.mark.parametrize(
    ("gpus", "local", "index"),
    [
        (4, 3, 3),
        (1, 3, 0),  # Slurm with a GPU for each task shows it that one alone
        (1, 0, 0),
        (4, None, 0),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_one_that_it_sees(
    gpus, local, index, monkeypatch
):
    on_machine(monkeypatch, gpus, local)
    assert ranks.device() == torch.device("cuda", index)
    assert ranks.device(use_cpu=True) == torch.device("cpu")


def test_more_ranks_than_gpus_is_an_error(monkeypatch):
    on_machine(monkeypatch, 2, 3)
    with pytest.raises(poise.Error, match="rank 3 of its machine, which has 2 GPUs"):
        ranks.device()


def test_without_gpus_it_is_the_cpu(monkeypatch):
    on_machine(monkeypatch, 0, 3)
    assert ranks.device() == torch.device("cpu")
