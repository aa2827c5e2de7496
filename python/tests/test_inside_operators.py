"""What operators take inside is planned, held to what an engine's ledger reads: to the byte, in every precision."""

from __future__ import annotations

import poise
import pytest
import torch
from poise import fake_trace, inside_operators
from poise.inside_operators import Inside
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {
    "fp32": {},
    "bf16": {"dtype": "bf16", "parameters": "bf16"},
    "bf16-autocast": {"dtype": "bf16"},
    "fp16-autocast": {"dtype": "fp16"},
}


class Residual(nn.Module):
    """Copies in the kernels' layout; a norm whose backward wants its input again."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.second = nn.Conv2d(24, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)

    def forward(self, x):
        x = F.relu(self.first(x))
        return (x + self.norm(self.second(x))).mean((2, 3))


class UNet(nn.Module):
    """Skip connections, normed groups, enlarged images; the loss saves a scalar in the memory of an image."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.inner = nn.Conv2d(16, 32, 3, padding=1)
        self.up = nn.Conv2d(32 + 16, 3, 3, padding=1)

    def forward(self, x):
        kept = self.down(x)
        inner = F.silu(self.inner(F.max_pool2d(kept, 2)))
        return F.mse_loss(self.up(torch.cat([F.interpolate(inner, scale_factor=2), kept], 1)), x)


class Recurrent(nn.Module):
    """A library's workspace, from forward to backward."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(32, 64, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0].square().mean()


class Mixed(nn.Module):
    """Under autocast sums of two types, of which one is cast first; products in 16 bits."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def images(count):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def rows(width):
    return lambda count: torch.randn(count, 64, width, generator=torch.Generator().manual_seed(1))


NOT_IN_TORCH = {("recurrent", "fp16-autocast"), ("residual", "bf16"), ("unet", "bf16")}
MODELS = {
    "residual": (Residual, images),
    "unet": (UNet, images),
    "recurrent": (Recurrent, rows(32)),
    "mixed": (Mixed, rows(128)),
}


def planned_and_read(make, batch_of, precision, samples=4):
    torch.manual_seed(0)
    model, batch = make(), batch_of(samples)
    if precision == "bf16":  # norms do not take inputs of another type than theirs
        batch = batch.bfloat16()
    answer = poise.plan(
        model,
        batch,
        global_batch_size=samples,
        micro_batch_size=samples,
        precision=precision,
    )
    assert answer.traced_by == "fake tensors"
    engine = poise.Engine(model, {"precision": SETTINGS[precision]})
    model.train()
    for _ in range(2):
        engine.step([batch], lambda batch: (model(batch).mean(), 1))
    return answer.best.at_peak, engine.memory()["at_peak"]


@pytest.mark.parametrize("precision", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_what_operators_take_inside_is_planned(name, precision):
    if (name, precision) in NOT_IN_TORCH:
        pytest.skip("torch has no such layer on every processor, or none that mixes such types")
    planned, read = planned_and_read(*MODELS[name], precision)
    for account, held in read.items():
        # A batch norm counts its micro-batches; a recurrent layer makes an empty gradient of its state.
        room = 1024 if name == "recurrent" else 64
        assert planned.get(account, 0) == pytest.approx(held, abs=room), account


@pytest.mark.parametrize("name", ["residual", "unet", "mixed"])
def test_calls_that_are_too_large_follow_from_smaller_ones(name, monkeypatch):
    make, batch_of = MODELS[name]
    monkeypatch.setattr(inside_operators, "MOST_BYTES", 1_000_000)  # of two samples or so
    planned, read = planned_and_read(make, batch_of, "fp32", samples=16)
    assert 1 <= sum(planned.values()) / sum(read.values()) < 1.05


def test_operators_are_called_for_cpus_alone(monkeypatch):
    made = []
    measured = inside_operators._measured
    monkeypatch.setattr(
        inside_operators, "_measured", lambda *args: made.append(args) or measured(*args)
    )
    plan = {"global_batch_size": 2, "micro_batch_size": 2}
    poise.plan(Residual(), images(2), gpus="1xH100-80GB", **plan)
    assert not made
    poise.plan(Residual(), images(2), **plan)
    assert made


def test_an_operator_of_ones_own_is_not_called_with_made_up_values():
    called = []

    @torch.library.custom_op("poise_test::careful", mutates_args=())
    def careful(x: torch.Tensor) -> torch.Tensor:
        called.append(x.shape)
        return x.clone()

    careful.register_fake(torch.empty_like)
    careful.register_autograd(lambda context, gradient: gradient)

    class Own(nn.Linear):
        def forward(self, x):
            return careful(super().forward(x))

    poise.plan(Own(8, 8), torch.randn(4, 8), global_batch_size=4)
    assert not called


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products_are_traced_in_every_type_that_a_cpu_multiplies(dtype):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 32, 32))

        def forward(self, x):
            ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
            return F.grouped_mm(x, self.weight, offs=ends).mean()

    model = Experts().to(dtype)
    traced = fake_trace.trace(
        model,
        lambda x: model(x),
        torch.randn(64, 32, dtype=dtype),
        blocks=[],
        recomputed=False,
        inside=Inside(),
    )
    assert traced.links[0].saved > 0
