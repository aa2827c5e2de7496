"""poise.Trainer on two gloo processes: the run of one rank, at every stage, and what ranks do apart."""

from __future__ import annotations

import poise
import pytest
import rank_processes
import torch
from poise.data import WindowIterator
from poise.training_arguments import TrainingArguments
from rank_processes import by_open_mpi, by_slurm, by_torchrun
from test_trainer import Rows, lines_of
from trainer_on_ranks import SAMPLES, SETTINGS, UPDATES, evaluated, trained

STAGES = ["stage 0", "stage 1", "stage 2", "stage 3", "kept"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return rank_processes.run("trainer_on_ranks.py", "runs", folder), folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same in this process: four micro-batches of two samples, one rank."""
    return trained(tmp_path_factory.mktemp("alone"), 0)


# The run.


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_one_rank(ranks, alone, stage):
    for of_rank in ranks[0]:
        seen = of_rank[stage]
        assert seen["step"] == UPDATES and seen["tokens"] == alone["tokens"]
        assert seen["losses"][:5] == pytest.approx(alone["losses"][:5], rel=1e-5)
        assert seen["evals"] == pytest.approx(alone["evals"], rel=1e-5)
        assert seen["last"] == pytest.approx(alone["last"], rel=1e-5)


def test_rates_are_those_of_one_rank(ranks, alone):
    # accelerate 1382, 2926: the schedule went as many times as fast.
    for of_rank in ranks[0]:
        for stage in STAGES:
            assert of_rank[stage]["rates"] == alone["rates"]
    assert alone["rates"] == pytest.approx([1e-2 * (UPDATES - i) / UPDATES for i in range(UPDATES)])


def test_samples_are_of_the_whole_model(ranks):
    folder, said = ranks[1], []
    for stage in (2, 3):
        lines = [line for line in lines_of(folder / f"stage{stage}") if "samples" in line]
        assert [line["step"] for line in lines] == [4]
        said.append(lines[0]["samples"])
    assert said[0] == said[1]


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(ranks, step):
    # accelerate 4195, 3996: the place in the data came back, its order did not.
    for of_rank in ranks[0]:
        whole, rest = of_rank["saving"], of_rank[f"resumed {step}"]
        assert whole["state"] == of_rank["stage 2"]["state"] == rest["state"]
        assert rest["losses"] == whole["losses"][step:] and rest["rates"] == whole["rates"][step:]


def test_ranks_have_the_same_bits(ranks):
    first, second = ranks[0]
    assert first["backend"] == "gloo"
    for stage in STAGES:
        for name in ("state", "losses", "evals", "last", "tokens"):
            assert first[stage][name] == second[stage][name], (stage, name)
    assert first["stage 0"]["state"] == first["stage 1"]["state"]
    assert first["stage 2"]["state"] == first["stage 3"]["state"] == first["kept"]["state"]


def test_random_streams_are_each_ranks_own(ranks, alone):
    first, second = ranks[0]
    assert first["stage 0"]["seeds"] == alone["seeds"] == [42] * UPDATES
    assert second["stage 0"]["seeds"] == [43] * UPDATES


def test_the_first_rank_alone_writes(ranks):
    of_ranks, folder = ranks
    lines = lines_of(folder / "stage3")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, UPDATES + 1))
    assert [line["loss"] for line in lines if "loss" in line] == of_ranks[0]["stage 3"]["losses"]
    assert [of_rank["stage 3"]["first"] for of_rank in of_ranks] == [True, False]
    assert of_ranks[1]["stage 3"]["level"] == of_ranks[0]["stage 3"]["level"]


def test_a_second_run_goes_on_from_the_first(ranks):
    for of_rank in ranks[0]:
        replicated, sharded = of_rank["twice"]
        assert replicated == sharded and sharded[0] != sharded[1]


@pytest.mark.parametrize("when", ["stopped", "stopped before"])
def test_one_rank_may_ask_for_the_end(ranks, when):
    assert [of_rank[when]["step"] for of_rank in ranks[0]] == [2, 2]


def test_ranks_ask_each_other_no_more_than_something_may_have_changed(ranks):
    for of_rank in ranks[0]:
        # For evaluations and for checkpoints, which signals ask for at any time; before the first
        # window, after the first epoch and after the last checkpoint.
        assert of_rank["stage 2"]["agreements"] == 2 * UPDATES + 3


# Evaluation.


def test_evaluations_are_those_of_one_rank_to_the_bit(ranks, tmp_path):
    expected = evaluated(tmp_path)
    for of_rank in ranks[0]:
        before = of_rank["before"]
        shuffled = before["losses"].pop("shuffled")
        assert shuffled == pytest.approx(expected["losses"]["shuffled"], rel=1e-6)
        assert before["losses"].items() <= expected["losses"].items()
        for size, values in expected["predictions"].items():
            assert before["predictions"][str(size)] == values


def test_samplers_that_split_by_themselves(ranks, alone):
    for of_rank in ranks[0]:
        updates, all_tokens, loss = of_rank["own sampler"]
        assert updates == 2 and all_tokens and loss > 0
    assert ranks[0][0]["own sampler"] == ranks[0][1]["own sampler"]


# Trouble.


def test_what_is_not_finite_on_one_rank_is_found_by_all(ranks):
    for of_rank in ranks[0]:
        assert "the loss is nan at update 1" in of_rank["nonfinite"]
        assert "On rank 1: Micro-batch 2 of 2 has 1 of 2 values" in of_rank["nonfinite"]


def test_an_exception_on_one_rank_ends_all(tmp_path):
    first, second = rank_processes.run("trainer_on_ranks.py", "fails", tmp_path)
    assert second[:2] == ["ValueError", "disk of rank 1"]
    assert first[0] == "Error" and "ValueError: disk of rank 1" in first[1] and first[2]


@pytest.mark.parametrize("launcher", [by_open_mpi, by_slurm])
def test_other_launchers(tmp_path, alone, launcher):
    values = rank_processes.run("trainer_on_ranks.py", "small", tmp_path, launcher=launcher)
    for rank, value in enumerate(values):
        assert value[:2] == [rank, 2]
        assert value[2] == pytest.approx(alone["losses"][:1], rel=1e-5)


# What ranks change of the arguments and of the data.


@pytest.fixture()
def two(monkeypatch):
    for name, value in by_torchrun(1, 2, 12345).items():
        monkeypatch.setenv(name, value)


def test_accumulation_counts_the_ranks(two):
    args = TrainingArguments(per_device_train_batch_size=2, global_batch_size=12)
    assert (args.accumulation, args.world_size, args.process_index) == (3, 2, 1)
    assert args.local_process_index == 1
    with pytest.raises(poise.Error, match="on 2 ranks; the first must be a multiple of 4"):
        TrainingArguments(per_device_train_batch_size=2, global_batch_size=10)
    with pytest.raises(poise.Error, match="makes 3 on 2 ranks; leave one out"):
        TrainingArguments(
            per_device_train_batch_size=2, global_batch_size=12, gradient_accumulation_steps=6
        )


def test_ranks_never_read_the_same_by_mistake(two):
    from poise import trainer_data
    from torch.utils.data import DataLoader, RandomSampler

    loader = DataLoader(Rows(8), sampler=RandomSampler(Rows(8), num_samples=4))
    with pytest.raises(poise.Error, match="same samples; use torch's DistributedSampler"):
        trainer_data.train_windows(loader, TrainingArguments())


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_on_what_one_rank_would(drop_last, ranks):
    """Micro-batches of all ranks, window by window, are those of one rank with as many more."""

    def windows(of, rank, accumulation):
        return list(
            WindowIterator(
                torch.arange(SAMPLES), 2, accumulation, ranks=of, rank=rank, drop_last=drop_last
            )
        )

    split = [windows(ranks, rank, 2) for rank in range(ranks)]
    whole = windows(1, 0, 2 * ranks)
    assert {len(of_rank) for of_rank in split} == {len(whole)}
    for parts, expected in zip(zip(*split, strict=True), whole, strict=True):
        samples = [int(i) for part in parts for batch in part for i in batch]
        assert samples == [int(i) for batch in expected for i in batch]
        if drop_last:
            assert all(len(batch) == 2 for part in parts for batch in part)


def test_what_the_engine_is_told_of_ranks():
    config = TrainingArguments(zero_stage=3, zero_keep_gathered=True, ddp_timeout=60).to_config(10)
    assert config["zero"] == {"stage": 3, "keep_gathered": "window", "shard_group_size": 0}
    assert config["comm"] == {"timeout_seconds": 60}
    assert SETTINGS["max_steps"] == UPDATES


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"zero_stage": 4}, "zero_stage is 4; use 0, 1, 2, 3"),
        ({"zero_keep_gathered": True}, "zero_stage 0, which shards no parameters"),
        ({"ddp_timeout": 0}, "ddp_timeout is 0"),
        ({"fsdp": "half_shard"}, "fsdp has 'half_shard'; poise knows full_shard"),
        ({"deepspeed": "ds.json"}, "there is no file 'ds.json'"),
    ],
)
def test_arguments_of_ranks_that_are_refused(arguments, words):
    with pytest.raises(poise.Error, match=words):
        TrainingArguments(**arguments)
