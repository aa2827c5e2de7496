"""`poise train` of a model of Python whose split is open: what happens where memory runs out after all."""

import json

import pytest
import torch
from poise import balance, cli, report

NET = """
import torch
from torch import nn


class Net(nn.Module):
    \"\"\"The first number of a sample says how often its blocks run.\"\"\"

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, labels):
        labels.clamp_(min=0)  # in what it was given
        for _ in range(int(x[:, 0].max())):
            for block in self.blocks:
                x = torch.tanh(block(x))
        return {"loss": nn.functional.cross_entropy(x, labels), "n": len(x)}


def build(deepest):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(32):
        x = torch.randn(64, generator=generator)
        x[0] = 1 if i < 16 else deepest
        rows.append({"x": x, "labels": torch.tensor(i % 3)})
    torch.manual_seed(0)
    return Net(), rows
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    (tmp_path / "deepening.py").write_text(NET)
    monkeypatch.chdir(tmp_path)

    def run(batch, memory, code=0):
        document = {
            "model": {"import": "deepening:build", "deepest": 50},
            "batch": {"global_batch_size": 8, **batch},
            "memory": memory,
            "checkpointing": {"policy": "none"},
            "data": {"shuffle": False},
            "train": {"output_dir": "out", "max_updates": 4, "log_every": 1},
        }
        (tmp_path / "run.json").write_text(json.dumps(document))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert cli.main(["train", "run.json"]) == code
        finally:
            torch.set_num_threads(threads)
        printed = capfd.readouterr()
        lines = [json.loads(line) for line in open("out/metrics.jsonl")]
        return lines, printed.out + printed.err

    return run


def test_it_halves_and_runs_the_same_window_again(run):
    # What one deep sample holds fits, and two do not; of shallow ones any number does.
    of_one, _ = run({"micro_batch_size": 1}, {})
    of_two, _ = run({"micro_batch_size": 2}, {})
    budget = (of_one[-1]["peak_bytes"] + of_two[-1]["peak_bytes"]) // 2
    found, text = run({}, {"budget_bytes": budget})
    assert "out of memory with micro-batches of 2 samples; the window runs again in halves" in text
    assert found[-1]["peak_bytes"] <= budget
    assert found[-1]["losses"] == pytest.approx(of_one[-1]["losses"], rel=1e-5)


def test_predicted_and_measured_are_in_metrics_and_report(run):
    lines, text = run({}, {"budget_bytes": "1GiB"})
    plan = next(line["plan"] for line in lines if "plan" in line)
    assert sum(plan["predicted"].values()) == pytest.approx(
        sum(plan["measured"].values()), rel=0.01
    )
    assert plan["predicted_seconds"] > 0 and plan["measured_seconds"] > 0
    page = report.page(lines, "run")
    assert "Plan against measured" in page and "<th>time</th>" in page


def test_where_nothing_fits_it_is_refused_or_begins_all_the_same(run, monkeypatch):
    smallest = balance.Candidate(1, 8, 0, 1 << 31, 1.0)

    def nothing(*arguments, **keywords):
        raise balance.NothingFits("[plan] no balance fits", smallest)

    monkeypatch.setattr(balance, "find", nothing)
    _, text = run({}, {"budget_bytes": "1GiB"}, code=1)
    assert "no balance fits" in text
    lines, text = run({}, {"budget_bytes": "1GiB", "on_misfit": "warn"})
    assert "it begins all the same, since on_misfit is warn" in text
    assert lines[-1]["micro_batch"] == 1 and lines[-1]["updates"] == 4
