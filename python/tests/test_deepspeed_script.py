"""examples/deepspeed_script.py with its one import replaced, on two ranks, beside plain float64 batches and
beside DeepSpeed itself where that is installed."""

import difflib
import importlib.util
import sys

import pytest
import rank_processes
import torch
from test_wrap import load

compare = load("compare_with_deepspeed")
SMALL = ["--epochs", "2", "--rows", "64", "--layers", "1", "--width", "32", "--length", "32"]
# Times what plain float32 batches are off. It is rounding, so one run may be luckier than another; a
# wrong scale, weight, rate or clip is off a thousand times as much.
LUCK = 4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return compare.for_poise(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def exact(script):
    return compare.plain(script, torch.float64, SMALL)


@pytest.fixture(scope="module")
def noise(script, exact):
    return compare.differences(compare.plain(script, torch.float32, SMALL), exact)


def by_poise(script, stage, folder):
    command = [sys.executable, *compare.command(script, stage, folder, SMALL)]
    rank_processes.finish(rank_processes.start(command, compare.RANKS))
    return compare.results(folder)


def check(found, noise):
    assert found["next_lr"] < 1e-12
    for name in ("loss", "norm", "weights"):
        assert found[name] <= LUCK * noise[name], name


def test_only_the_import_is_another(script):
    lines = (path.read_text().splitlines() for path in (compare.SCRIPT, script))
    changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
    assert changed == ["- import deepspeed", "+ import poise.deepspeed as deepspeed"]


@pytest.mark.parametrize("stage", compare.STAGES)
def test_the_script_trains_as_big_batches_in_float64(stage, script, exact, noise, tmp_path):
    norms = [update["norm"] for update in exact[0]]
    assert len(norms) == 8 and max(norms) > compare.settings(stage)["gradient_clipping"]
    check(compare.differences(by_poise(script, stage, tmp_path), exact), noise)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
@pytest.mark.parametrize("stage", compare.STAGES)
def test_the_script_trains_as_deepspeed_does(stage, script, noise, tmp_path):
    theirs = compare.by_torchrun(compare.SCRIPT, stage, tmp_path / "deepspeed", SMALL)
    check(compare.differences(by_poise(script, stage, tmp_path / "poise"), theirs), noise)
