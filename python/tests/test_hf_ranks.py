"""transformers' models on two ranks at the stages of ZeRO: the losses of a float64 loop of one rank."""

import json
import sys

import pytest
import rank_processes
import torch
import transformers
from hf_models import MODELS, counted, made
from test_hf_trainer import reference, windows_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("name", "stage"), [("llama", 2), ("llama", 3), ("bert", 3)])
def test_two_ranks_train_as_one_in_float64(name, stage, tmp_path):
    script = rank_processes.FOLDER / "hf_on_ranks.py"
    command = [sys.executable, str(script), name, str(stage), str(tmp_path)]
    outputs = rank_processes.finish(rank_processes.start(command, 2))
    said = json.loads(outputs[0].strip().splitlines()[-1])
    rows = MODELS[name][1](20)
    model, seen = reference(name, made(name), windows_of(rows))
    assert said["losses"] == pytest.approx(seen, rel=2e-5)
    rows = [row for row in MODELS[name][1](5) if counted(name, row)]
    with torch.no_grad():
        sums = [
            float(model(**{k: v[None] for k, v in row.items()}).loss) * counted(name, row)
            for row in rows
        ]
    mean = sum(sums) / sum(counted(name, row) for row in rows)
    assert said["eval_loss"] == pytest.approx(mean, rel=1e-3)
    saved = type(made(name)).from_pretrained(tmp_path / "checkpoint-3")  # whole, at every stage
    assert isinstance(saved, transformers.PreTrainedModel)
    for p, q in zip(saved.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.double(), q, rtol=0, atol=3e-4)
