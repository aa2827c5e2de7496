"""zero.shard_group_size: ranks divided into groups that shard among themselves, over gloo."""

from __future__ import annotations

import poise
import pytest
import rank_processes
import torch
from groups_on_ranks import STAGES
from poise.deepspeed.config import read
from test_ranks import check_against_float64
from tiny_models import tiny
from training_on_ranks import FP32, windows_of


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    seen = rank_processes.run("groups_on_ranks.py", "settings", folder, size=4)
    return seen, torch.load(folder / "settings.pt")


@pytest.mark.parametrize("stage", STAGES)
def test_the_training_is_that_of_one_group(four, stage):
    seen, masters = four
    for size in (0, 1, 2):
        key = f"{stage}, {size}"
        for of_rank in seen:
            assert of_rank["seen"][key] == seen[0]["seen"][key]
        check_against_float64(masters[key], tiny(), windows_of([1] * 4, 3), FP32)


def test_states_are_split_by_the_group(four):
    for of_rank in four[0]:
        for stage in STAGES:
            by_size = [of_rank["bytes"][f"{stage}, {size}"] for size in (0, 2, 1)]
            # The padding makes it a little more than a half.
            assert by_size[0] < by_size[1] < by_size[2]
            assert by_size[1] == pytest.approx(by_size[2] / 2, rel=0.2)
        assert of_rank["by hand"] == of_rank["wrapped"] == of_rank["bytes"]["3, 2"]


def test_groups_that_cannot_be_made_are_errors(four):
    for of_rank in four[0]:
        assert "shard groups of 3 ranks do not divide the 4 ranks" in of_rank["odd"]
        assert (
            "zero.shard_group_size is 2, and the group given is none of" in of_rank["not torch's"]
        )
        assert "zero.shard_group_size is 1, but of the 4 ranks given 2 shard" in of_rank["other"]


def test_ranks_of_a_group_are_called_by_their_numbers_in_the_world(tmp_path):
    said = rank_processes.run("groups_on_ranks.py", "lost", tmp_path, size=4)[2]
    assert said.startswith("[comm] rank 3 ") and "ended the group: no more tokens" in said


def test_faces_divide_ranks(tmp_path):
    first, second = rank_processes.run("groups_on_ranks.py", "faces", tmp_path)
    for seen in (first, second):
        assert seen["trainer 1"] > 1.5 * seen["trainer 0"]
        assert seen["mics"] > 1.5 * seen["neither"]
        assert seen["hpz off"] == seen["neither"]
        assert seen["mics, masters"] == pytest.approx(seen["neither, masters"], rel=1e-5)
        assert "zero_shard_group_size 3 does not divide the 2 ranks" in seen["odd"]
        assert "zero_shard_group_size is 2 at zero_stage 0" in seen["stage 0"]
    assert first["mics, masters"] == second["mics, masters"]


def test_keys_of_deepspeed():
    def size(**keys):
        zero = read({"zero_optimization": {"stage": 3, **keys}}).engine["zero"]
        return zero.get("shard_group_size", 0)

    assert size() == size(mics_shard_size=-1) == size(zero_hpz_partition_size=1) == 0
    assert size(mics_shard_size=8) == size(zero_hpz_partition_size=8) == 8
    assert size(mics_shard_size=8, zero_hpz_partition_size=8) == 8
    with pytest.raises(poise.Error, match="mics_shard_size is 8 and zero_hpz_partition_size 4"):
        size(mics_shard_size=8, zero_hpz_partition_size=4)


def test_one_rank_shards_nothing():
    engine = poise.Engine(tiny(), {"zero": {"stage": 3, "shard_group_size": 8}})
    assert engine.group.size == 1 and not engine.shards_parameters()
