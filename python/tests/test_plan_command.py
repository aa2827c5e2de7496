"""`poise plan run.json` of a model of Python."""

from __future__ import annotations

import json
import re

import poise
import pytest
import torch
from poise import cli, plan_command
from poise.models.byte_gpt import ByteGPT

pytestmark = pytest.mark.usefixtures("one_thread")

FUNCTION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 3)

    def forward(self, x, labels):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}

def build(width):
    rows = [{"x": torch.randn(8), "labels": torch.tensor(1)} for _ in range(32)]
    return Net(width), rows
"""


def plan_of(tmp_path, capsys, *arguments, **sections):
    (tmp_path / "planned_net.py").write_text(FUNCTION)
    path = tmp_path / "run.json"
    model = {"import": "planned_net:build", "width": 64}
    path.write_text(json.dumps({"model": model, "batch": {"global_batch_size": 16}, **sections}))
    code = cli.main(["plan", str(path), *arguments])
    return code, capsys.readouterr()


def test_a_model_of_python_in_a_run_file(tmp_path, capsys):
    code, printed = plan_of(tmp_path, capsys, "--json")
    answer = json.loads(printed.out)
    assert code == 0 and answer["fits"] and answer["traced_by"] == "fake tensors"
    best = answer["best"]
    assert best["micro_batch"] * best["accumulation"] == 16
    # 8 x 64, 4 of 64 x 64 and 64 x 3, each with its vector, each padded to 256: 16 bytes each.
    elements = 512 + 256 + 4 * (4096 + 256) + 256 + 256
    assert sum(best["held"].values()) == 16 * elements
    assert answer["moments"][0]["moment"] == "forward of the embedding"
    code, printed = plan_of(tmp_path, capsys, memory={"budget_bytes": 16 * elements})
    assert code == 1
    # The loss says no count: as in `poise train`, the micro-batch is the usual one.
    assert best["micro_batch"] == 8 and "separable_loss=True" in answer["notes"][0]
    nearest = re.search(r"the nearest budget that works is (\S+);", printed.out)[1]
    assert "most of it optimizer" in printed.out and "the same training would fit: " in printed.out
    assert printed.out.count("the nearest budget that works is") == 1
    assert (
        "the same training: optimizer states on the host (offload.optimizer: host): " in printed.out
    )
    code, _ = plan_of(tmp_path, capsys, "--memory", nearest)
    assert code == 0
    code, printed = plan_of(tmp_path, capsys, "--gpus", "4xA100-40GB", "--price", "1.5")
    assert code == 0 and f"{4 * 1.5 * 730:.0f} a month" in printed.out


def test_what_is_searched_for_whatever_the_file_says_is_noted(tmp_path, capsys):
    _, printed = plan_of(tmp_path, capsys)
    assert "searched for" not in printed.out
    _, printed = plan_of(tmp_path, capsys, checkpointing={"policy": "every_n"})
    assert "searched for, whatever the file says of it: checkpointing.policy\n" in printed.out


def test_no_more_rows_are_printed_than_is_said():
    model = ByteGPT(layers=4, width=32, heads=4, sequence_length=16)
    tokens = torch.zeros(1, 17, dtype=torch.long)
    answer = poise.plan(
        model,
        tokens,
        global_batch_size=64,
        separable_loss=True,
        loss_fn=lambda ids: model.loss(ids[:, :-1], ids[:, 1:]),
    )
    assert len(answer.front) > plan_command.ROWS
    text = "\n".join(plan_command._lines(answer, []))
    front = text.split("Time against memory")[1].split("Next best")[0]
    assert 2 < front.count("micro-batch ") <= plan_command.ROWS + 1


def test_what_a_model_of_python_cannot_be_planned_with_is_said(tmp_path, capsys):
    code, printed = plan_of(tmp_path, capsys, offload={"gradients": "host"})
    assert code == 1 and "poise.plan(..., offload=...) instead" in printed.err
    code, printed = plan_of(tmp_path, capsys, "--gpus", "3xA100-40GB")
    assert code == 1 and "the nearest that are: 15 and 18" in printed.err


def test_devices_and_the_page_are_those_of_the_command(tmp_path, capsys):
    device = {"memory": "8GiB", "half_flops": 1e13, "memory_rate": 1e11}
    (tmp_path / "device.json").write_text(json.dumps(device))
    page = tmp_path / "plan.html"
    gpus = f"2x{tmp_path}/device.json"
    code, printed = plan_of(
        tmp_path, capsys, "--gpus", gpus, "--nodes", "2", "--html", str(page), "--json"
    )
    answer = json.loads(printed.out)
    assert code == 0 and answer["best"]["ranks"] == 4
    assert 6 << 30 < answer["budget_bytes"] < 8 << 30  # less what is left to libraries
    html = page.read_text()
    for part in ("Memory over an update", "Time against memory", "What each lever buys"):
        assert part in html
    assert "samples per second and device" in html and html.count("<svg") == 2
    slow, fast = (
        json.loads(plan_of(tmp_path, capsys, "--gpus", gpus, *more, "--json")[1].out)["best"]
        for more in (("--node-link", "0.001"), ("--node-link", "1000"))
    )
    assert slow["seconds"]["update"] > fast["seconds"]["update"]
    code, printed = plan_of(tmp_path, capsys, "--html", str(tmp_path / "none" / "plan.html"))
    assert code == 1 and "give another file with --html" in printed.err
    code, printed = plan_of(tmp_path, capsys, "--gpus", "2xnowhere.json")
    assert code == 1 and "cannot read nowhere.json" in printed.err
