"""`poise train` of a Python model, saved and resumed: the lines of the unbroken run, to the bit."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import poise
import pytest
import torch
from poise import _C, cli
from terminal import environment

NETS = """
import os
import signal

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2)
        )

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.layers(x), labels)


class Rows(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, i):
        noise = torch.rand(3)  # augmentation by torch's own generator
        return {"x": torch.tensor([i / 23.0, 1.0, -1.0]) + 0.1 * noise, "labels": torch.tensor(i % 2)}


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(8):
            noise = torch.rand(3)
            yield {"x": float(i) + 0.1 * noise, "labels": torch.tensor(i % 2)}


class Sampling(Net):
    # Draws in eval mode, and ends the run there, if asked to, in a forward.
    ends_at = None

    def __init__(self, width):
        super().__init__(width)
        self.judged = 0

    def forward(self, x, labels):
        if not self.training:
            torch.rand(3)
            self.judged += 1
            if self.judged == self.ends_at:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x, labels)


def sampling(width=8):
    return Sampling(width), Rows(), Rows()


def rows(width=8):
    return Net(width), Rows()


def stream(width=8):
    return Net(width), Stream()


def judged(width=8):
    return Net(width), Rows(), Rows()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: several wait for each other
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("nets", None)


def train(folder, function, *changes):
    document = {
        "model": {"import": f"nets:{function}"},
        "batch": {"micro_batch_size": 2, "accumulation": 3},
        "optimizer": {"lr": 0.05},
        "schedule": {"type": "cosine", "warmup_updates": 2, "total_updates": 13},
        "train": {"max_updates": 13, "log_every": 4},
    }
    (folder / "run.json").write_text(json.dumps(document))
    parts = [part for change in changes for part in ("--set", change)]
    return cli.main(["train", str(folder / "run.json"), *parts])


def lines_of(folder, out):
    measured = ("tokens_per_second", "tokens_per_s", "peak_bytes", "accounts", "host_bytes")
    lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in measured} for line in lines]


@pytest.mark.parametrize("function", ["rows", "stream"])
def test_every_save_is_resumed_to_the_bit(folder, function):
    assert train(folder, function, "train.output_dir=whole") == 0
    want = lines_of(folder, "whole")
    assert train(folder, function, "train.output_dir=part", "state.save_every=3") == 0
    assert lines_of(folder, "part") == want
    saves = _C.list_saves("part/state")
    assert len(saves) == 5  # 3, 6, 9, 12 and the end
    for save in saves:
        assert train(folder, function, "train.output_dir=part", f"state.resume={save}") == 0
        assert lines_of(folder, "part") == want


def test_auto_begins_and_goes_on(folder, capsys):
    changes = ("train.output_dir=out", "state.save_every=4", "state.resume=auto")
    assert train(folder, "rows", *changes, "train.max_updates=6") == 0
    assert "no save in out/state: a new run" in capsys.readouterr().out
    assert train(folder, "rows", *changes) == 0
    assert "resumed from out/state/update-00000006 after update 6" in capsys.readouterr().out
    assert train(folder, "rows", "train.output_dir=whole") == 0
    assert lines_of(folder, "out")[-1]["losses"] == lines_of(folder, "whole")[-1]["losses"]


@pytest.mark.parametrize("rate", [0.05, 30.0])
def test_the_save_of_the_best_validation_stays(folder, rate):
    settings = ("state.save_every=4", "state.save_total_limit=1", "state.keep_best=true")
    settings += ("train.validate_every=1", f"optimizer.lr={rate}", "state.resume=auto")
    assert train(folder, "judged", *settings, "train.output_dir=out") == 0
    state, lines = folder / "out" / "state", lines_of(folder, "out")
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert len(losses) == 13
    best = min(losses, key=losses.get)  # the first of equals
    assert (state / "best").readlink().name == f"update-{best:08d}"
    kept = {f"update-{best:08d}", "update-00000013"}
    assert {Path(save).name for save in _C.list_saves(str(state))} == kept
    _C.verify_save(str(state / "best"))
    again = (*settings, "train.output_dir=again")
    assert train(folder, "judged", *again, "train.max_updates=5") == 0
    assert train(folder, "judged", *again) == 0
    assert (folder / "again" / "state" / "best").readlink().name == f"update-{best:08d}"


def test_a_best_one_that_is_saved_already_is_not_written_again(folder, monkeypatch):
    saved = []
    save = poise.Engine.save
    monkeypatch.setattr(
        poise.Engine,
        "save",
        lambda self, *a, **k: saved.append(self.updates) or save(self, *a, **k),
    )
    settings = ("state.save_every=4", "state.keep_best=true", "train.output_dir=out")
    assert train(folder, "judged", *settings) == 0  # validates at the end alone
    assert saved == [4, 8, 12, 13]
    state = folder / "out" / "state"
    assert (state / "best").readlink().name == "update-00000013"
    _C.verify_save(str(state / "best"))
    manifest = json.loads((state / "best" / "manifest.json").read_text())
    [loss] = [line["eval_loss"] for line in lines_of(folder, "out") if "eval_loss" in line]
    assert float(manifest["user"]["best"]) == loss


@pytest.mark.parametrize("at", [3, 18])
def test_a_validation_that_a_signal_ends_is_made_by_the_resumed_run(folder, at):
    settings = ("state.save_every=100", "state.resume=auto", "train.validate_every=1")
    settings += ("train.validation_batches=8",)
    assert train(folder, "sampling", *settings, "train.output_dir=whole") == 0
    sys.modules["nets"].Sampling.ends_at = at
    out = (*settings, "train.output_dir=out")
    assert train(folder, "sampling", *out) == 128 + signal.SIGTERM
    assert lines_of(folder, "out")[-1]["updates"] == -(-at // 8)
    sys.modules["nets"].Sampling.ends_at = None
    assert train(folder, "sampling", *out) == 0
    assert lines_of(folder, "out") == lines_of(folder, "whole")


def test_other_data_is_refused(folder, capsys):
    assert train(folder, "rows", "train.output_dir=out", "state.save_every=4") == 0
    changes = ("train.output_dir=out", "state.resume=auto", "engine.seed=9")
    assert train(folder, "rows", *changes) == 1
    assert "was made with other data" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_first(folder, number):
    changes = ("train.max_updates=120", "schedule.total_updates=120", "state.resume=auto")
    assert train(folder, "stream", "train.output_dir=whole", *changes) == 0
    command = [sys.executable, "-m", "poise", "train", "run.json"]
    for change in ("train.output_dir=out", "state.save_every=100000", *changes):
        command += ["--set", change]
    process = subprocess.Popen(
        command, env=environment() | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    try:
        metrics, end = folder / "out" / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
            time.sleep(0.005)
        process.send_signal(number)
        out, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 128 + number, out
    assert "saved after update" in out
    assert train(folder, "stream", "train.output_dir=out", *changes) == 0
    # BatchNorm's statistics hold the window that was given back: of no weight in training losses.
    assert lines_of(folder, "out")[-1]["losses"] == lines_of(folder, "whole")[-1]["losses"]


def test_a_damaged_save_is_an_error(folder, capsys):
    assert train(folder, "rows", "train.output_dir=out", "state.save_every=4") == 0
    shard = folder / "out/state/update-00000013/rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert train(folder, "rows", "train.output_dir=out", "state.resume=auto") == 1
    assert "rank-00000.safetensors is damaged" in capsys.readouterr().err
    assert poise._C.find_save("out/state").endswith("update-00000013")
