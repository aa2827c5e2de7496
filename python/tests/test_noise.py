"""The gradient noise scale in a Trainer's lines, and what it says about the batch."""

import math

import poise
import pytest
import torch
from poise import noise
from torch import nn
from torch.utils.data import Dataset

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, SAMPLES, SPREAD = 200, 4096, 0.5


class Rows(Dataset):
    """Samples whose gradients are themselves: a known mean and a known covariance."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.mean = 0.1 * torch.randn(WIDTH, generator=generator)
        noise_of = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.rows = self.mean + SPREAD * noise_of

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return {"x": self.rows[i], "labels": torch.tensor(0)}


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, labels):
        return {"loss": (x @ self.weight).mean()}


def test_a_trainers_lines_have_it_and_its_advice_is_told_at_the_end(tmp_path, capsys):
    data = Rows()
    args = poise.TrainingArguments(
        str(tmp_path),
        optim="sgd",
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        logging_steps=32,
        save_strategy="no",
        noise_scale=True,
    )
    trainer = poise.Trainer(model=Linear(), args=args, train_dataset=data)
    trainer.train()
    want = WIDTH * SPREAD**2 / float(data.mean.pow(2).sum())
    lines = [line["noise_scale"] for line in trainer.state.log_history if "noise_scale" in line]
    assert len(lines) == 4
    assert lines[-1] == pytest.approx(want, rel=0.25)
    shown = "".join(capsys.readouterr())
    assert "gradient noise scale: " in shown


def test_advice():
    assert "saves updates" in noise.advice(3200.0, 320.0)
    assert "11.0 times the fewest updates, 1.1 times the fewest tokens" in noise.advice(
        3200.0, 320.0
    )
    assert "a 10th saves tokens" in noise.advice(320.0, 3200.0)
    assert "well chosen" in noise.advice(1000.0, 1000.0)
    assert "beyond" in noise.advice(math.inf, 1000.0)
