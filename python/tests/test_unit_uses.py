"""Blocks used in every way that a forward may, on two gloo ranks at every stage."""

from __future__ import annotations

import pytest
import rank_processes
import torch
from test_ranks import CLASSES, check_against_float64
from training_on_ranks import FP32, STAGES, windows_of
from units_on_ranks import LATE, MODELS, UNEVEN, UPDATES, made

# What a block and others get as well has its gradients summed in another order at stage 3.
SUMMED_ANEW = ("notes", "changed in place", "frozen norms, reentrant")


def run(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp(name)
    seen = rank_processes.run("units_on_ranks.py", name, folder)
    file = folder / f"{name}.pt"
    return seen, torch.load(file) if file.exists() else None


@pytest.fixture(scope="module")
def uses(tmp_path_factory):
    return run(tmp_path_factory, "uses")


@pytest.mark.parametrize("name", MODELS)
def test_blocks_train_however_they_are_used(uses, name):
    (first, second), masters = uses
    for stage in STAGES:
        key = f"{name}, {stage}"
        assert first[key] == second[key], "the ranks differ"
        if name not in SUMMED_ANEW or stage < 3:
            assert first[key] == first[f"{name}, {CLASSES[stage]}"], "the bits of its class"
        # torch.autograd.grad, which the yardstick uses, knows no reentrant checkpoint.
        plain = made(name.removesuffix(", reentrant"))
        check_against_float64(masters[key], plain, windows_of([2, 2], UPDATES), FP32)


def test_late_gradients_where_a_rank_has_no_micro_batch(tmp_path_factory):
    (first, second), masters = run(tmp_path_factory, "late")
    assert first == second
    for name in LATE:
        for stage in (0, 1, 2):
            for counts in UNEVEN:
                key = f"{name}, {stage}, {counts}"
                plain = made(name.removesuffix(", reentrant"))
                check_against_float64(masters[key], plain, windows_of(counts, UPDATES), FP32)


def test_hooks_on_parameters_change_their_gradients(tmp_path_factory):
    first, second = run(tmp_path_factory, "gradient_hooks")[0]
    assert first == second
    for stage in STAGES:
        assert first[str(stage)] == pytest.approx([3.0, 1.0], rel=1e-5)


def test_a_region_of_n_recomputed_units_is_gathered_n_less_one_times_more(tmp_path_factory):
    first, second = run(tmp_path_factory, "regions")[0]
    assert first == second
    for reentrant in (False, True):
        plain = first[f"0, {reentrant}"]
        assert plain == 2 * 6 + 1  # blocks before and after; what is in no block once
        for size in (1, 2, 3, 6):
            more = 6 // size * (size - 1)
            assert first[f"{size}, {reentrant}"] == plain + more, (size, reentrant)


def same_at_every_stage(seen):
    """Of both ranks; to the bit in a class of stages, near it over all."""
    first, second = seen
    assert first == second
    for stage in STAGES:
        assert first[str(stage)] == first[str(CLASSES[stage])]
        for mine, whole in zip(first[str(stage)][0], first["0"][0], strict=True):
            assert mine[:2] == pytest.approx(whole[:2], rel=1e-5)
            assert mine[2:] == whole[2:]


def test_a_term_that_counts_on_one_rank_only(tmp_path_factory):
    same_at_every_stage(run(tmp_path_factory, "parts")[0])


def test_two_forwards_before_one_backward(tmp_path_factory):
    same_at_every_stage(run(tmp_path_factory, "two_forwards")[0])


def test_copies_and_pickles_belong_to_no_engine(tmp_path_factory):
    for seen in run(tmp_path_factory, "copies")[0]:
        assert [seen[str(stage)] for stage in (0, 1, 2)] == [""] * 3
        assert "parameter 'embedding.weight' is sharded" in seen["3"]


def test_one_rank_alone_gets_the_model_unit_by_unit(tmp_path_factory):
    first, second = run(tmp_path_factory, "saves")[0]
    assert first["Written"]["written"] and first["Doubling"]["written"]
    for seen in (first, second):
        assert seen["Written"]["same"] and seen["Doubling"]["same"]
        assert seen["Written"]["whole"] < 1.2 / 16  # one unit, with its padding
        assert seen["Doubling"]["whole"] >= 1  # made whole at once


def test_a_forward_that_failed_may_be_run_again(tmp_path_factory):
    first, second = run(tmp_path_factory, "forwards")[0]
    assert first == second
    for stage in (0, 1, 2):
        assert first[f"{stage}, True"] == first[f"{stage}, False"]


def test_a_forward_that_fails_on_one_rank_is_told_to_all_at_stage_3(tmp_path_factory):
    first, second = run(tmp_path_factory, "failing")[0]
    assert second.startswith("IndexError: ")
    assert "rank 1" in first and "ended the group: IndexError: index out of range" in first


def test_a_block_left_out_on_one_rank_is_named(tmp_path_factory):
    for message in run(tmp_path_factory, "skipping")[0]:
        assert "parameters of blocks.0" in message and "parameters of blocks.1" in message
        assert "all ranks must run the same parts of the model" in message


def test_what_changes_between_windows_is_named(tmp_path_factory):
    for hooked in run(tmp_path_factory, "changed")[0]:
        assert "parameter 'blocks.0.up.weight' has a post-accumulate-grad hook" in hooked
