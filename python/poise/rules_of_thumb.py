"""Rules that the field repeats, beside the planner's figures: python -m poise.rules_of_thumb."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from poise.planning import Plan, PlanAnswer, plan

PAGE = "docs/rules_of_thumb.md"
GB, GIB = 1e9, 2**30
NEAR = 0.10  # how far off a figure may be and still be called right


class Rule(NamedTuple):
    """What is said, what the planner finds, and the verdict: right, wrong, or it depends."""

    said: str
    found: str
    verdict: str
    why: str


def rules() -> Iterator[Rule]:
    """All of them, in the order of the page."""
    yield from _states()
    yield from _recomputation()
    yield _mixed_precision()
    yield from _stages()
    yield _eight_cards()
    yield _accumulation()
    yield Rule(
        "The learning rate grows linearly, or with the square root, of the batch",
        "no bytes and no seconds: the same plan",
        "not the planner's",
        "A plan never changes the global batch, so no rule of this kind is ever needed to follow one.",
    )
    yield _ramp()


def page() -> str:
    """The page of docs, in Markdown."""
    lines = [
        "# Rules of thumb",
        "",
        "Made by `python -m poise.rules_of_thumb > docs/rules_of_thumb.md`. What the field repeats, beside what the",
        "planner finds ([planner.md](planner.md)): bytes are counted, times are estimates that order plans. A figure",
        f"within {NEAR:.0%} is called right.",
        "",
        "| what is said | what the planner finds | verdict |",
        "|---|---|---|",
    ]
    found = list(rules())
    lines += [f"| {rule.said} | {rule.found} | **{rule.verdict}** |" for rule in found]
    lines += ["", "Why:", ""]
    lines += [f"- *{rule.said}*: {rule.why}" for rule in found]
    return "\n".join(lines) + "\n"


def _found(
    model: str, tokens: int, batch: int, gpus: str, precision: str = "bf16", **more: object
) -> PlanAnswer:
    return plan(model, tokens, global_batch_size=batch, gpus=gpus, precision=precision, **more)


def _kept(answer: PlanAnswer, recomputed: int) -> Plan:
    """The plan of the front, or the best one, that recomputes so many blocks and whole logits."""
    plans = [answer.best, *answer.front]
    return next(p for p in plans if len(p.recomputed) == recomputed and not p.selective)


def _near(found: float, said: float) -> bool:
    return abs(found / said - 1) <= NEAR


def _states() -> Iterator[Rule]:
    answer = _found("llama-2-7b", 4096, 8, "8xH200-141GB", stages=[0], micro_batch_size=1)
    held = sum(answer.best.held.values()) - answer.best.held["communication"]
    parameters = answer.best.held["parameters"] / 2
    each = held / parameters
    yield Rule(
        "4 + 2 + 12 bytes per parameter",
        f"{each:.2f} in 16 bits: 2 + 4 (gradient sums) + 4 (masters) + 8 (moments); 16 in fp32",
        "right" if _near(each, 18) else "wrong",
        "The sum is right, the parts are not: the fp32 copy is in the 12 already, and the 4 are the sums of the "
        "gradients.",
    )
    total = held / GB
    yield Rule(
        "28 + 14 + 84 = 126 GB for 7B",
        f"{total:.1f} GB for Llama 2's {parameters / 1e9:.2f}B",
        "right" if _near(total, 126) else "wrong",
        "Of one rank that holds everything; a model called 7B has 6.7B parameters.",
    )
    free = _kept(answer, 0)
    activations = free.at_peak["activations"] / GB
    yield Rule(
        "plus activations and about 1 GB",
        f"{activations:.1f} GB of activations for one sequence of 4,096 tokens, nothing recomputed; 1.5 GiB and 2% of "
        "the device beside them",
        "right" if activations < 1.1 else "wrong",
        "Activations are no afterthought: they grow with every token of the micro-batch and decide the plan.",
    )


def _recomputation() -> Iterator[Rule]:
    job = {"micro_batch_size": 1, "stages": [3], "memory_budget": "1000GiB"}
    free = _found("llama-2-7b", 4096, 8, "8xH100-80GB", **job)
    blocks = 32
    none = _kept(free, 0)
    # The one of the front that recomputes most; beyond it the head is what is highest.
    whole = max((p for p in free.front if not p.selective), key=lambda p: len(p.recomputed))
    again = whole.seconds["recompute"] * blocks / len(whole.recomputed)
    cost = again / (none.seconds["forward"] + none.seconds["backward"])
    yield Rule(
        "Recomputing all activations costs 30% more compute",
        f"{cost:.1%}: one forward more beside one forward and a backward of two",
        "right" if abs(cost - 0.30) <= 0.05 else "wrong",
        "The blocks' forward again; embedding and head are not repeated.",
    )
    keeps, passes_on = (_step(free, found) for found in (none, whole))
    segment = max(1, round(math.sqrt(blocks * passes_on / keeps)))
    usual = round(math.sqrt(blocks))
    yield Rule(
        f"Checkpoints every sqrt(n) blocks are best: every {usual} of {blocks}",
        f"every {segment}: a block keeps {keeps / passes_on:.0f} times its input",
        "right" if segment == usual else "wrong",
        "Segments of k blocks hold n / k inputs and k whole blocks at once, least at k = sqrt(n x input / kept). The "
        "rule is for chains whose links keep as much as they pass on.",
    )


def _step(answer: PlanAnswer, found: Plan) -> int:
    """Bytes that one block keeps: what the next one's forward begins with more."""
    moments = dict(answer.moments(found))
    first, second = (moments[f"forward of block {i}"]["activations"] for i in (1, 2))
    return second - first


def _mixed_precision() -> Rule:
    def saved(size: int) -> float:
        more = {"micro_batch_size": size, "memory_budget": "100000GiB"}
        peaks = [
            _kept(_found("gpt2-xl", 1024, size, "1xH200-141GB", precision, **more), 0).peak_bytes
            for precision in ("fp32", "bf16")
        ]
        return 1 - peaks[1] / peaks[0]

    small, large = saved(1), saved(32)
    holds = 0.3 <= small <= 0.4 and 0.3 <= large <= 0.4
    return Rule(
        "Mixed precision saves 30 to 40% of memory",
        f"GPT-2 XL: {small:+.0%} at one sequence, {large:+.0%} at 32",
        "right" if holds else "depends",
        "It halves activations and adds 2 bytes to the 16 of each parameter: what it saves is the share that "
        "activations have.",
    )


def _stages() -> Iterator[Rule]:
    chosen = {}
    for gpus in (8, 64, 1024):
        best = _found("llama-3-8b", 8192, 1024, f"{gpus}xH100-80GB").best
        chosen[gpus] = best.stage
    small = {chosen[8], chosen[64]}
    listed = ", ".join(f"{gpus}: stage {stage}" for gpus, stage in chosen.items())
    yield Rule(
        "ZeRO-2 for 8 to 64 GPUs",
        f"Llama 3 8B on H100-80GB, 1,024 sequences of 8,192 tokens: {listed}",
        "right" if small == {2} else "wrong",
        "The number of GPUs does not choose the stage: what fits does, and among what fits the traffic. With "
        "accumulation stage 2 joins gradients in every micro-batch.",
    )
    large = _found("llama-2-70b", 4096, 1024, "256xH100-80GB")
    yield Rule(
        "ZeRO-3 with pipelines beyond",
        f"Llama 3 8B on 1,024: stage {chosen[1024]}; Llama 2 70B on 256: stage {large.best.stage}, "
        f"{'fits' if large.fits else 'does not fit'}",
        "depends",
        "poise has no pipelines; what stage 3 costs is its traffic, which enough tokens per rank hide "
        "(docs/planner_scores.md has published runs of both).",
    )


def _eight_cards() -> Rule:
    fits = {
        name: _found(model, 4096, 64, "8xA100-80GB").fits
        for name, model in (("7B", "llama-2-7b"), ("13B", "llama-2-13b"), ("70B", "llama-2-70b"))
    }
    listed = ", ".join(f"{name} {'fits' if yes else 'does not'}" for name, yes in fits.items())
    right = fits["7B"] and fits["13B"] and not fits["70B"]
    return Rule(
        "8 x A100-80GB train 7B to 13B",
        f"Llama 2 at 4,096 tokens: {listed}",
        "right" if right else "wrong",
        "All parameters trained with AdamW in 16 bits.",
    )


def _accumulation() -> Rule:
    counts = {}
    for batch in (64, 512, 4096):
        counts[batch] = _found("llama-3-8b", 8192, batch, "8xH100-80GB").best.accumulation
    inside = all(4 <= count <= 16 for count in counts.values())
    listed = ", ".join(f"{batch}: {count}" for batch, count in counts.items())
    return Rule(
        "Accumulate 4 to 16 micro-batches",
        f"Llama 3 8B on 8 x H100-80GB, by global batch: {listed}",
        "right" if inside else "wrong",
        "It is the global batch over micro-batch and ranks, whatever that makes.",
    )


def _ramp() -> Rule:
    steps = [min(2 * epoch, 8) for epoch in range(6)]
    clamped = [max(1, step) for step in steps]
    return Rule(
        "Ramp the accumulation: min(2 epoch, 8)",
        f"epochs 0 to 5: {', '.join(map(str, steps))}; clamped to 1: {', '.join(map(str, clamped))}",
        "wrong" if min(steps) < 1 else "right",
        "At epoch 0 it accumulates nothing at all. Clamped, windows of any length can be run; each is one batch, so "
        "the batch grows eightfold and memory does not.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(page(), end="")
