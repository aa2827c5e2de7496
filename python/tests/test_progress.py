"""The live bar of a Trainer on a real terminal, and its absence elsewhere."""

import math
import re
import subprocess
import sys

import pytest
from poise.progress import line_of
from terminal import environment, run_in_terminal

PROGRAM = """
import poise, torch
from poise import _C

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x, labels):
        x = self.layer(x)[:, None]
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x)[:, 0]
        return torch.nn.functional.cross_entropy(x, labels)

class Speaks:
    def on_step_end(self, args, state, control, **details):
        if state.global_step == 2:
            _C.log_write(1, "a note of the core")

data = [{"x": torch.ones(4), "labels": torch.tensor(i % 3)} for i in range(8)]
args = poise.TrainingArguments("out", per_device_train_batch_size=2, max_steps=4, use_cpu=True, logging_steps=2)
poise.Trainer(Net(), args, train_dataset=data, callbacks=[Speaks()]).train()
print("printed", flush=True)
"""


@pytest.mark.parametrize("columns", [120, 0])
def test_a_terminal_shows_one_bar_that_is_written_over(tmp_path, columns):
    (tmp_path / "program.py").write_text(PROGRAM)
    status, text = run_in_terminal([sys.executable, "program.py"], tmp_path, columns=columns)
    assert status == 0
    lines = text.replace("\r\n", "\n").split("\n")
    bar = [line for line in lines if "update" in line and "|" in line]
    shown = [piece for line in bar for piece in line.split("\r") if "4/4" in piece]
    assert shown and all(word in shown[-1] for word in ("loss=", "lr=", "norm=", "tok/s=", "mem="))
    # Every line of text stands by itself: whatever was there before is wiped or written over.
    final = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).split("\r")[-1].strip() for line in lines]
    for expected in ("poise trains Net on cpu", "a note of the core", "printed"):
        assert final.count(expected) == 1
    assert [line.split("  ")[0] for line in final if "  norm " in line] == [
        "update 2/4",
        "update 4/4",
    ]
    assert any(line.startswith("attention: scaled_dot_product_attention by") for line in final)
    rates = [line for line in final if "update/s" in line or "s/update" in line]
    assert len(rates) == 1  # one bar stays


def test_without_a_terminal_there_is_no_bar(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    status, text = run_in_terminal([sys.executable, "program.py"], tmp_path, stderr=False)
    assert status == 0
    assert text.replace("\r\n", "\n") == "printed\n"


def test_piped_output_has_the_banner_and_no_bar(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "printed\n"
    assert "micro-batch 2 x accumulation 1" in done.stderr and "\r" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("update")]
    line = r"update 2/4  loss \d\.\d{4}  lr [\d.e-]+  norm \d\.\d{3}  [\d,]+ tokens/s  [\d.]+ KiB \([\d.e-]+%\)"
    assert re.fullmatch(line, lines[0]) and len(lines) == 3
    assert re.fullmatch(r"update 4/4  done: mean loss \d\.\d{4}  [\d.]+ s  [\d.]+ KiB", lines[2])


def test_a_line_tells_evaluations_and_what_was_not_applied():
    assert line_of(
        {"step": 3, "eval_loss": 1.5, "eval_accuracy": 0.25, "eval_runtime": 2.0}, 9
    ) == ("update 3/9  eval_loss 1.5000  eval_accuracy 0.25")
    bad = {"step": 4, "loss": math.nan, "status": "nonfinite_gradient", "skipped": 1}
    assert line_of({**bad, "first_bad_parameter": "head"}, 9) == (
        "update 4/9  loss nan  nonfinite_gradient in head: not applied  1 skipped"
    )
