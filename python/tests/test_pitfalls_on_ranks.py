"""What goes wrong in other trainers on several ranks, by the behaviour that is right, on two gloo ranks."""

import pytest
import rank_processes
from training_on_ranks import STAGES


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pitfalls")
    first, second = rank_processes.run("pitfalls_on_ranks.py", "everything", folder)
    assert first == second
    return first


def near_float64(distances, ways):
    assert len(distances) == ways
    assert {name: far for name, far in distances.items() if not far < 1e-6} == {}


def test_branches_that_alternate_by_micro_batch_and_by_window(seen):
    # DeepSpeed 545, 5828, 3599: parameters with gradients in some micro-batches only.
    near_float64(seen["alternating"], ways=2 * 4 * 2)


def test_ranks_that_run_other_branches(seen):
    # pytorch 158719, 148334; DeepSpeed 4094, 7461: hangs, and gradients that did not match.
    near_float64(seen["by_rank"], ways=3)


def test_a_block_without_gradients_in_a_window_stays_as_it_was(seen):
    # DeepSpeed's stage 3 applied the gradient of the window before.
    near_float64(seen["every_other_window"], ways=4 * 2)


def test_several_forwards_and_an_evaluation_before_a_backward(seen):
    # DeepSpeed 1938, 1903, 3599: a trace of the order of modules that did not hold.
    near_float64(seen["forwards"], ways=4)


def test_an_overflow_where_a_rank_has_no_shard(seen):
    # pytorch 99174; fairscale 179: no record of infinities on that rank.
    for stage in STAGES:
        statuses, weight = seen["smaller_than_the_world"][str(stage)]
        assert statuses == [["overflow", 512.0], ["overflow", 256.0], ["applied", 256.0]]
        assert weight == pytest.approx(0.9)
