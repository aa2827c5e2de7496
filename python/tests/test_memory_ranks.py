"""Memory that runs out on one of two gloo ranks: both run the window again in halves."""

from __future__ import annotations

import pytest
import rank_processes
from memory_on_ranks import BUDGETS
from training_on_ranks import STAGES


def run(tmp_path_factory, name):
    return rank_processes.run("memory_on_ranks.py", name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def budgets(tmp_path_factory):
    return run(tmp_path_factory, "budgets")


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    return run(tmp_path_factory, "by_hand")


@pytest.fixture(scope="module")
def python_errors(tmp_path_factory):
    return run(tmp_path_factory, "python_errors")


@pytest.mark.parametrize(
    ("policy", "stage"), [(policy, stage) for policy, stages in BUDGETS.items() for stage in stages]
)
def test_a_budget_that_one_rank_does_not_keep(budgets, policy, stage):
    for of_rank in budgets:
        seen = of_rank[f"{policy}, {stage}"]
        # As if it had been run in halves from the start: the same random numbers and buffers too.
        assert seen["fitted"] == seen["halves"]
        assert seen["fitted"] != seen["whole"]  # dropout's masks are another split's
        assert len(seen["notes"]) == 1 and "halves of them" in seen["notes"][0]
        halves, _, fitted = seen["runs"]
        assert halves < fitted <= halves + 2
    (short, _), (long, budget) = (of_rank[f"{policy}, {stage}"]["own"] for of_rank in budgets)
    assert short < budget < long  # rank 0 alone would have gone on
    assert "rank 1 ran out of memory" in budgets[0][f"{policy}, {stage}"]["notes"][0]
    for number in (0, 2, 3):
        mine, other = (
            [line[number] for line in of_rank[f"{policy}, {stage}"]["fitted"]["numbers"]]
            for of_rank in budgets
        )
        assert mine == other


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_errors_of_python_code(python_errors, stage, where, of_all):
    for of_rank in python_errors:
        seen = of_rank[f"{stage}, {where}, {of_all}"]
        assert seen["same"]
        assert len(seen["notes"]) == 1 and f"in {where}" in seen["notes"][0]
        assert seen["held"] == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_three_call_form(by_hand, stage, where):
    first, second = (of_rank[f"{stage}, {where}"] for of_rank in by_hand)
    assert first["same"] and second["same"]
    assert first["lost"] == second["lost"] == 1
    assert len(first["told"]) == len(second["told"]) == 1
    assert f"in {where}" in second["told"][0]
    assert "rank 1 ran out of memory" in first["told"][0]


def test_a_training_step_of_ones_own(tmp_path_factory):
    first, second = run(tmp_path_factory, "trainers")
    assert first == second
    for stage in (0, 3):
        for where in ("forward", "backward"):
            assert first[f"{stage}, {where}"][:2] == [2, 1]


def test_a_trainers_split_that_is_too_large_for_one_rank_alone(tmp_path_factory):
    of_ranks = run(tmp_path_factory, "longer_on_one_rank")
    for stage in ("0", "3"):
        for of_rank in of_ranks:
            seen = of_rank[stage]
            assert seen["chosen"] == 8 and seen["parts"] == 2 and seen["lost"] == 1
            # Losses, norms, tokens, parameters and the rows that the model saw: those of a run in
            # micro-batches of 4 from the start, dropout's masks too.
            assert seen["found"] == seen["halves"]
            assert seen["found"]["calls"] == 3 * 8
            assert seen["peak"] <= seen["own"][1]
        (short, budget), (long, _) = (of_rank[stage]["own"] for of_rank in of_ranks)
        assert short < budget < long  # rank 0 alone would have gone on
        assert of_ranks[0][stage]["found"]["lines"] == of_ranks[1][stage]["found"]["lines"]


def test_trials_of_balances_that_run_out_on_one_rank(tmp_path_factory):
    of_ranks = run(tmp_path_factory, "trials")
    assert of_ranks[0].keys() == of_ranks[1].keys() and len(of_ranks[0]) == 4 * len(STAGES)
    for of_rank in of_ranks:
        for case, seen in of_rank.items():
            if case.endswith("2"):
                assert seen["chosen"] in (1, 2), case
            else:
                assert "a micro-batch of 1" in seen["chosen"], case
            assert seen["same"] and seen["held"] == 0, case
    for case, seen in of_ranks[0].items():
        assert seen["chosen"] == of_ranks[1][case]["chosen"]


def test_blocks_that_ranks_leave_out_are_seen_as_one_link_on_all(tmp_path_factory):
    first, second = run(tmp_path_factory, "left_out_blocks")
    assert first == second and len(first) == 8


def test_a_first_sample_that_runs_out_on_one_rank_says_the_same_on_all(tmp_path_factory):
    first, second = run(tmp_path_factory, "first_sample")
    assert first == second == {str(stage): [None, True] for stage in STAGES}


def test_one_of_several_ranks_may_plan(tmp_path_factory):
    first, second = run(tmp_path_factory, "plans_alone")
    assert first == ["a measured micro-batch", 0] and second is None


def test_single_samples_cannot_be_halved(tmp_path_factory):
    first, second = run(tmp_path_factory, "single")
    assert "never enough" in second[0] and "rank 1 ran out of memory" in first[0]
    assert first[1] == second[1] == 2
