"""Which GPU a rank takes, as told by its launcher and by what it sees; and how a batch gets there."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import NamedTuple

import poise
import pytest
import torch
import transformers
from poise import model_view, ranks
from poise._read_ahead import ReadAhead
from poise.trainer_balance import samples_in
from poise.trainer_data import to_device
from torch import nn
from torch.nn.utils.rnn import pack_sequence


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


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_that_see_the_same_gpu_are_told(shared, monkeypatch):
    on_machine(monkeypatch, 1, 1, size=2)
    notes = {"gpu/0": "GPU-a"}
    group = SimpleNamespace(rank=1, size=2, leave_note=notes.__setitem__, note=notes.get)
    properties = SimpleNamespace(uuid="GPU-a" if shared else "GPU-b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    told = pytest.raises(poise.Error, match="ranks 1 and 0 have the same GPU")
    with told if shared else contextlib.nullcontext():
        ranks._refuse_a_shared_gpu(group, torch.device("cuda", 0), timeout=10)


def test_a_rank_that_does_not_say_its_gpu_is_named(monkeypatch):
    on_machine(monkeypatch, 1, 1, size=2)
    notes, checks = {}, []
    group = SimpleNamespace(
        rank=1, size=2, leave_note=notes.__setitem__, note=notes.get, check=lambda: checks.append(1)
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a")
    )
    with pytest.raises(
        poise.Error, match=r"rank 1 waited 0.1 s for rank 0 to say which GPU it has"
    ):
        ranks._refuse_a_shared_gpu(group, torch.device("cuda", 0), timeout=0.1)
    assert checks, "of a lost rank the group tells"


def test_without_gpus_it_is_the_cpu(monkeypatch):
    on_machine(monkeypatch, 0, 3)
    assert ranks.device() == torch.device("cpu")


class Quantized(nn.Linear):
    """Refuses to move, as models of bitsandbytes do."""

    def to(self, *args, **kwargs):
        raise ValueError("`.to` is not supported for 4-bit models")


def test_a_model_that_is_there_already_is_not_moved(tmp_path):
    model = Quantized(3, 1)
    assert model_view.moved_to(model, torch.device("cpu")) is model
    with pytest.raises(ValueError, match="not supported for 4-bit"):
        model_view.moved_to(model, torch.device("meta"))
    args = poise.TrainingArguments(str(tmp_path), use_cpu=True)
    assert poise.Trainer(model, args).model is model


@pytest.mark.parametrize(
    ("size", "given", "waits"),
    [
        (2, {"zero_stage": 3}, True),
        (2, {}, True),  # the stage is open
        (2, {"zero_stage": 2}, False),
        (2, {"per_device_train_batch_size": 2}, False),
        (1, {}, False),
        (1, {"offload_parameters": "host"}, True),
    ],
)
def test_a_model_that_may_be_sharded_waits_for_its_engine(size, given, waits, monkeypatch):
    monkeypatch.setattr(ranks, "here", lambda: ranks.Here(0, size, 0))
    args = poise.TrainingArguments(
        "out", use_cpu=True, global_batch_size=8, memory_budget="1GiB", **given
    )
    assert args.shards_parameters is waits


@pytest.mark.parametrize("initialized", [True, False])
def test_what_is_read_ahead_is_read_for_the_gpu_of_who_reads(initialized, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: taken.append((gpu, threading.current_thread().name))
    )
    assert list(ReadAhead(iter(range(5)), depth=2)) == list(range(5))
    assert taken == ([(3, "poise-read-ahead")] if initialized else [])


# Batches; the meta device stands for a GPU.

META = torch.device("meta")


class Graph:
    """Moves itself, in place and whole, as graphs of torch_geometric do."""

    def __init__(self):
        self.x, self.name = torch.zeros(2), "graph"

    def to(self, device):
        self.x = self.x.to(device)
        return self


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_tensors_of_a_batch_are_moved_wherever_they_are():
    x = torch.zeros(2)
    moved = to_device({"a": [x, "text", (x, 1)], "pair": Pair(x, "b")}, META)
    assert type(moved) is dict and moved["pair"].name == "b"
    tensors = [moved["a"][0], moved["a"][2][0], moved["pair"].x]
    assert all(tensor.is_meta for tensor in tensors)
    assert moved["a"][1] == "text" and moved["a"][2][1] == 1


def test_sizes_of_packed_sequences_stay_on_the_cpu():
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    (moved,) = to_device((packed,), META)
    assert type(moved) is type(packed)
    assert moved.data.is_meta and moved.batch_sizes.tolist() == [2, 2, 1]


def test_what_can_move_itself_does_and_the_windows_own_stays():
    graph = Graph()
    moved = to_device([graph], META)[0]
    assert moved.x.is_meta and moved.name == "graph" and not graph.x.is_meta


def test_a_tokenizers_batch_keeps_its_type():
    batch = transformers.BatchEncoding({"input_ids": torch.zeros(3, 2)})
    moved = to_device(batch, META)
    assert moved.input_ids.is_meta and not batch.input_ids.is_meta
    assert samples_in(batch) == 3
