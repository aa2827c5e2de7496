"""The Python examples run, and show what they say."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def gpt():
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLES / "gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(gpt, *extra):
    size = [
        "--updates",
        "5",
        "--global-batch",
        "8",
        "--layers",
        "2",
        "--width",
        "32",
        "--length",
        "32",
    ]
    return gpt.main([*size, *extra])


def test_gpt_learns_the_same_however_it_is_split(gpt, capsys):
    big = run(gpt, "--accumulation", "1")
    assert big[-1] < big[0]
    assert run(gpt, "--accumulation", "4") == pytest.approx(big, rel=1e-5)
    assert run(gpt, "--accumulation", "4", "--checkpointing", "sqrt") == pytest.approx(
        big, rel=1e-5
    )
    assert "def " in capsys.readouterr().out


def test_gpt_in_bf16(gpt):
    assert run(gpt, "--precision", "bf16") == pytest.approx(run(gpt), rel=1e-2)
