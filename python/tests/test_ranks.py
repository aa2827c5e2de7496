"""poise.Engine on two gloo processes: the same training at every stage, to the bit where promised."""

from __future__ import annotations

import dataclasses

import plain_loop
import pytest
import rank_processes
import torch
from engine_on_ranks import (
    ACCUMULATIONS,
    OPTIMIZERS,
    PRECISIONS,
    recipe_of,
    tied,
)
from tiny_models import batch, tiny
from training_on_ranks import FP32, STAGES, windows_of

CLASSES = {0: 0, 1: 0, 2: 2, 3: 2}  # the stage whose bits a stage has


def run(tmp_path_factory, name):
    """What both ranks saw, and the masters (None where a case has none)."""
    folder = tmp_path_factory.mktemp(name)
    seen = rank_processes.run("engine_on_ranks.py", name, folder)
    file = folder / f"{name}.pt"
    return seen, torch.load(file) if file.exists() else None


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return run(tmp_path_factory, "grid")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    return run(tmp_path_factory, "uneven")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return run(tmp_path_factory, "shapes")


@pytest.fixture(scope="module")
def between(tmp_path_factory):
    return run(tmp_path_factory, "between")[0]


def joined(windows):
    """All ranks' micro-batches of each update, in rank order."""
    return [[piece for of_rank in window for piece in of_rank] for window in windows]


def check_against_float64(masters, model, windows, recipe):
    """At most twice the error of plain torch over the same micro-batches in one process."""
    exact_recipe = dataclasses.replace(recipe, dtype=torch.float64, autocast=None, parameters=None)
    exact, exact_losses = plain_loop.train(model.double(), joined(windows), exact_recipe)
    plain, _ = plain_loop.train(model.float(), joined(windows), recipe)
    ours = {name: value.double() for name, value in masters.items()}
    exact = {name: exact[name] for name in ours}
    assert plain_loop.error(ours, exact) <= 2 * plain_loop.error(plain, exact)
    return exact_losses


# The grid.


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_grid(grid, precision, optimizer, accumulation):
    (first, second), masters = grid
    for stage in STAGES:
        name = f"{precision}, {optimizer}, {accumulation}, {stage}"
        same = f"{precision}, {optimizer}, {accumulation}, {CLASSES[stage]}"
        assert first[name] == second[name], "the ranks differ"
        assert first[name] == first[same], "the bits of its class of stages"
        assert {loss[-1] for loss in first[name]["losses"]} == {"applied"}
        recipe, windows = recipe_of(precision, optimizer), windows_of([accumulation] * 2)
        losses = check_against_float64(masters[name], tiny(), windows, recipe)
        near = 1e-6 if precision == "fp32" else 2e-2
        assert [loss[0] for loss in first[name]["losses"]] == pytest.approx(losses, rel=near)


# Ranks that have unequal work.


@pytest.mark.parametrize("counts", [[3, 2], [3, 0], [0, 2]], ids=str)
def test_uneven_numbers_of_micro_batches(uneven, counts):
    (first, second), masters = uneven
    for stage in STAGES:
        name = f"{counts}, {stage}"
        assert first[name] == second[name]
        assert first[name] == first[f"{counts}, {CLASSES[stage]}"]
        check_against_float64(masters[name], tiny(), windows_of(counts), FP32)


# Models.


@pytest.mark.parametrize("policy", ["none", "every_n"])
def test_tied_frozen_and_called_twice(shapes, policy):
    (first, second), masters = shapes
    for stage in STAGES:
        name = f"{policy}, {stage}"
        assert first[name] == second[name]
        assert first[name] == first[f"none, {CLASSES[stage]}"]
        assert not any(key.startswith("blocks.0") for key in masters[name])
        check_against_float64(masters[name], tied(), windows_of([2, 2]), FP32)


# Between updates.


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_and_text_between_updates_change_nothing(between, stage):
    first, second = between
    for of_rank, length in ((first, 3 + 4), (second, 3 + 7)):
        assert of_rank[f"unchanged {stage}"]
        texts = of_rank[f"texts {stage}"]
        assert texts[0::2] == texts[1::2]  # that of a copy of the whole model
        assert all(len(text[0]) == length for text in texts)
    assert all(
        long[0][:7] == short[0]
        for long, short in zip(second[f"texts {stage}"], first[f"texts {stage}"], strict=True)
    )
    assert first[f"evaluations {stage}"] == second[f"evaluations {stage}"]
    assert first[f"evaluations {stage}"] == first[f"evaluations {CLASSES[stage]}"]


@pytest.mark.parametrize("stage", STAGES)
def test_the_writers_edit_is_everybodys(between, stage):
    first, second = between
    assert first[f"edited {stage}"] == second[f"edited {stage}"]
    assert first[f"edited {stage}"] == first[f"edited {CLASSES[stage]}"]


def test_a_sharded_state_is_the_whole_one(between):
    for of_rank in between:
        assert of_rank["state 3 last"] == of_rank["state 0"]


def test_a_sharded_model_is_not_read_by_mistake(between):
    for weight, state in (of_rank["refused"] for of_rank in between):
        assert "parameter 'blocks.0.up.weight' is sharded" in weight
        assert "use engine.state_dict()" in state


def test_fifty_engines_leave_nothing_behind(tmp_path_factory):
    for seen in run(tmp_path_factory, "many")[0]:
        threads, held = zip(*seen, strict=True)
        assert threads[-1] == threads[9]
        assert held[-1] - held[9] < 1 << 20, (held[9], held[-1])  # one of them has 13 MiB


def test_evaluations_differ_from_update_to_update(between):
    """The comparisons above would also hold of a model that does not train."""
    values = between[0]["evaluations 3"]
    assert len(set(values)) == len(values) == 4
    assert batch(2, 12, seed=0)["input_ids"].shape == (2, 12)


def test_ranks_need_not_drop_their_engines_together(tmp_path_factory):
    """A group that ended with its last engine would end on rank 1 while rank 0 uses it again."""
    digests = run(tmp_path_factory, "held")[0]
    assert len(set(digests[0] + digests[1])) == 1
