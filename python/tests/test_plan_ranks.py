"""What is planned for several ranks, held to what ranks over gloo hold, account by account."""

from __future__ import annotations

import functools

import pytest
import rank_processes
from plan_on_ranks import GROUPS, MICRO_BATCH, MODELS, STAGES, WINDOW
from poise import _C, fake_trace, traced_model
from poise.planned_loss import PlannedLoss


@functools.cache
def traced(model, precision):
    module, piece, loss = MODELS[model]()
    blocks = fake_trace.blocks_of(module, None)
    planned = PlannedLoss(module, loss)
    found, _ = traced_model.traced(planned, piece, blocks, precision, [MICRO_BATCH], [])
    return found, len(blocks)


def planned(model, precision, stage, shard_ranks, ranks):
    """By account: between updates, at the peak, and the most that collectives hold at any moment."""
    job = _C.PlanJob()
    job.run_on(f"{ranks}xCPU")
    job.compute_in(precision, precision)
    job.optimize_with("adamw")
    chain, blocks = traced(model, precision)
    job.trace(model, chain)
    job.recompute([False] * blocks)
    job.sequence, job.micro_batch = 1, MICRO_BATCH
    job.global_batch = MICRO_BATCH * WINDOW * ranks
    job.stages, job.shard_ranks = [stage], [shard_ranks or ranks]
    answer = _C.plan_search(job)
    best = next(plan for plan in [answer.best, *answer.front] if not plan.keep_gathered)
    most = max(held["communication"] for _, held in _C.plan_moments(job, best))
    return best.held, best.at_peak, most


@pytest.mark.parametrize(("case", "ranks"), [("stages", 2), ("stages", 4), ("groups", 4)])
def test_accounts_of_ranks_are_as_planned(case, ranks, tmp_path):
    cases = {"stages": STAGES, "groups": GROUPS}[case]
    of_ranks = rank_processes.run("plan_on_ranks.py", case, tmp_path, ranks)
    for number, settings in enumerate(cases):
        held, at_peak, most = planned(*settings, ranks)
        for built, peak, own in (of_rank[number] for of_rank in of_ranks):
            assert held == built, settings
            assert most == own["communication"], settings
            for account in ("parameters", "gathered", "gradients", "optimizer", "communication"):
                assert at_peak[account] == peak[account], (settings, account)
