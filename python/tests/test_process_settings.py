"""full_determinism and tf32: what they set in torch for the process."""

from __future__ import annotations

import os

import poise
import pytest
import torch
from hf_models import causal_rows, made
from poise import process_settings
from test_hf_trainer import arguments
from tiny_models import same_bits


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "x")  # so that it is put back
        monkeypatch.delenv(name)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    names = [(cudnn, "deterministic"), (cudnn, "benchmark"), (cudnn, "allow_tf32")]
    before = [(*one, getattr(*one)) for one in (*names, (matmul, "allow_tf32"))]
    cudnn.deterministic, cudnn.benchmark = False, True
    cudnn.allow_tf32, matmul.allow_tf32 = True, False
    yield
    torch.use_deterministic_algorithms(False)
    for where, name, value in before:
        setattr(where, name, value)


def trained(folder, **given):
    torch.manual_seed(0)
    model = made("gpt2")
    poise.Trainer(
        model, arguments(folder, max_steps=2, **given), train_dataset=causal_rows(8)
    ).train()
    return model


def test_full_determinism_asks_torch_for_it_and_changes_nothing_on_the_cpu(tmp_path):
    plain = trained(tmp_path / "plain")
    assert not torch.are_deterministic_algorithms_enabled()
    model = trained(tmp_path / "deterministic", full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert same_bits(plain, model)


def test_a_workspace_of_the_users_own_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    process_settings.apply(True, None, torch.device("cpu"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("capability", [(7, 0), (9, 0)])
def test_tf32_is_torchs(tf32, capability, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    process_settings.apply(False, tf32, torch.device("cuda", 0))
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32
    assert ("computes without it" in caplog.text) == (tf32 and capability < (8, 0))


def test_without_a_word_torch_stays_as_it_is(tmp_path):
    trained(tmp_path)
    assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
