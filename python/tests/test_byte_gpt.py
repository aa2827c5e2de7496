"""The byte-level GPT: the same model in both languages, and what it promises."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import poise
import pytest
import torch
from poise.models import ByteGPT

BUILD = Path(poise.__file__).absolute().parent.parent.parent
PROGRAM = BUILD / "bin" / "poise"
CACHE = BUILD / "CMakeCache.txt"
# A developer's build has the program; where it is missing there the test fails, which a skipped one
# would hide.
HAS_PROGRAM = CACHE.exists() and "POISE_DEVELOPER:BOOL=ON" in CACHE.read_text()
SHAPE = {"layers": 2, "width": 16, "heads": 4, "sequence_length": 12}


def test_names_are_those_of_the_cpp_twin():
    # tests/cli/byte_gpt_test.cpp has the same list.
    names = [name for name, _ in ByteGPT(**{**SHAPE, "layers": 1}).named_parameters()]
    block = ["ln1", "qkv", "proj", "ln2", "fc", "out"]
    inner = [f"blocks.0.{layer}.{kind}" for layer in block for kind in ("weight", "bias")]
    assert names == ["tok.weight", "pos.weight", *inner, "ln.weight", "ln.bias", "head.weight"]


def test_sees_only_the_past():
    model = ByteGPT(**SHAPE)
    tokens = torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 8] = 200
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8], after[:, 8])


def test_writes_text():
    model = ByteGPT(**SHAPE)
    assert len(model.generate(b"abc", 20)) == 20
    assert model.generate(b"abc", 20) == model.generate(b"abc", 20, seed=7)
    assert model.generate(b"abc", 20, 1.0, seed=1) != model.generate(b"abc", 20, 1.0, seed=2)
    assert model.training


@pytest.mark.skipif(not HAS_PROGRAM, reason="an installed package has no C++ program")
def test_trains_as_its_cpp_twin_does(tmp_path):
    """`poise train` against a plain torch loop: 6 updates of AdamW, data in order, no clipping."""
    micro, accumulation, updates, length, lr = 2, 3, 6, SHAPE["sequence_length"], 1e-3
    text = bytes(i * i * 7 % 251 for i in range(micro * accumulation * updates * length + 1))
    (tmp_path / "text.bin").write_bytes(text)
    run = {
        "batch": {"micro_batch_size": micro, "accumulation": accumulation},
        "optimizer": {"lr": lr, "weight_decay": 0.1, "max_grad_norm": 0, "decay_rule": "all"},
        "engine": {"seed": 5},
        "model": SHAPE,
        "data": {"train": [str(tmp_path / "text.bin")], "shuffle": False},
        "train": {
            "output_dir": str(tmp_path / "out"),
            "max_updates": updates,
            "validation_batches": 0,
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert PROGRAM.exists(), f"build it: ninja -C {BUILD} poise_cli"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([PROGRAM, "train", tmp_path / "run.json"], check=True, env=environment)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = json.loads(lines[-1])["losses"]

    tokens = torch.tensor(list(text))
    model = ByteGPT(**SHAPE, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    for update in range(updates):
        total = 0.0
        for piece in range(accumulation):
            first = (update * accumulation + piece) * micro * length
            inputs = tokens[first : first + micro * length].view(micro, length)
            targets = tokens[first + 1 : first + 1 + micro * length].view(micro, length)
            loss = model.loss(inputs, targets)
            (loss / accumulation).backward()
            total += loss.item() / accumulation
        optimizer.step()
        optimizer.zero_grad()
        # The first update shows that both start from the same bits; the others drift by rounding.
        assert losses[update] == pytest.approx(total, rel=2e-7 if update == 0 else 2e-6)
