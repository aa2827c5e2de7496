"""The four small classes over the engine, against plain float64 loops."""

import poise
import pytest
import torch
import torch.nn.functional as F
from poise.thin_faces import AccumulationConfig
from torch import nn
from wrapped_loops import distance, network, plain, rows

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = {"optimizer": {"type": "sgd", "lr": 0.1, "max_grad_norm": 0.0}}


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x, labels):
        return F.cross_entropy(self.body(x), labels)


def micro_batches(data, size):
    return iter([data[i : i + size] for i in range(0, len(data), size)])


def test_core_operation_is_one_window_and_its_loss():
    data, model, reference = rows(22), WithLoss(), network(dtype=torch.float64)
    config = {"micro_batch_size": 4, "accumulation_steps": 2, "gradient_checkpointing": True}
    system = poise.GradientAccumulationSystem(config).over(model, SGD)
    batches, losses = micro_batches(data, 4), []
    with pytest.raises(StopIteration):
        while True:
            losses.append(system.core_operation(batches))
    windows = [data[:8], data[8:16], data[16:]]
    expected = []
    for window in windows:
        with torch.no_grad():
            expected.append(float(F.cross_entropy(reference(window[0].double()), window[1])))
        plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [window])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert distance(model.body, reference) < 1e-6
    assert system.last_result.updates == 3


def test_its_config_says_what_the_engine_does():
    config = AccumulationConfig(2, 8, True, torch.float16, 128.0, 3, 2)
    settings = config.settings()
    assert settings["batch"] == {"micro_batch_size": 2, "accumulation": 8}
    assert settings["precision"] == {"dtype": "fp16", "loss_scale": 128.0}
    assert settings["checkpointing"] == {"policy": "every_n", "n": 3}
    assert settings["zero"] == {"stage": 2}
    with pytest.raises(poise.Error, match="has no micro_batch; it knows"):
        poise.GradientAccumulationSystem({"micro_batch": 2})
    with pytest.raises(poise.Error, match="no model yet"):
        poise.GradientAccumulationSystem({}).core_operation(iter([1]))


def test_mixed_precision_unscales_before_it_clips():
    data, model, reference = rows(8), network(), network(dtype=torch.float64)
    trainer = poise.MixedPrecisionTrainer("fp16", loss_scale=256.0).over(model, SGD)
    assert trainer.loss_scale == 256
    x, y = data[:8]
    with trainer.autocast():
        logits = model(x)
        assert logits.dtype == torch.float16
        loss = F.cross_entropy(logits.float(), y)
    trainer.backward(loss, tokens=8)
    norm = trainer.clip_grad_norm(0.25)
    assert trainer.update_scale().clipped_norm == pytest.approx(0.25, rel=1e-4)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    (expected,) = plain(reference, sgd, [(x, y)], max_norm=0.25)
    assert norm == pytest.approx(expected, rel=1e-2)  # a forward in fp16
    assert distance(model, reference) < 1e-4


def test_an_overflow_changes_the_scale_alone():
    model = network()
    trainer = poise.MixedPrecisionTrainer(torch.float16).over(model, SGD)
    before = [p.detach().clone() for p in model.parameters()]
    with trainer.autocast():
        loss = model(rows(4)[:4][0]).float().sum() * 1e38
    trainer.backward(loss, tokens=4)
    scale = trainer.loss_scale
    assert not trainer.update_scale().applied
    assert trainer.loss_scale == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.calls = [0] * 4
        for i, block in enumerate(self.blocks):
            block[0].register_forward_hook(lambda *_, i=i: self.count(i))

    def count(self, index):
        self.calls[index] += 1

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_are_recomputed_where_that_is_needed():
    model = Blocks()
    checkpoint = poise.ActivationCheckpoint(checkpoint_every_n=2)
    assert not checkpoint.enable_if_needed(model, needed_bytes=10, budget_bytes=20)
    assert checkpoint.enable_if_needed(model, needed_bytes=30, budget_bytes=20)
    x = torch.randn(3, 8)
    model(x).sum().backward()
    again = [p.grad.clone() for p in model.parameters()]
    assert sorted(model.calls) == [1, 1, 2, 2]  # every second one twice
    checkpoint.disable()
    assert not checkpoint.enabled
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(again, model.parameters(), strict=True))
    calls = []

    def inside(a):
        calls.append(1)
        return (a * a).sin()

    a = torch.randn(3, requires_grad=True)
    checkpoint.recompute(inside, a).sum().backward()
    assert len(calls) == 2
    assert torch.allclose(a.grad, (a * a).cos() * 2 * a)


def test_zero_optimizer_has_its_calls():
    data, model, reference = rows(8), network(), network(dtype=torch.float64)
    optimizer = poise.ZeROOptimizer(stage=2).over(model, {"batch": {"accumulation": 2}, **SGD})
    optimizer.engine.backward(F.cross_entropy(model(data[:4][0]), 2 - data[:4][1]), tokens=4)
    optimizer.zero_grad()  # dropped
    for x, y in micro_batches(data, 4):
        optimizer.engine.backward(F.cross_entropy(model(x), y), tokens=4)
    optimizer.reduce_scatter_gradients()
    gradient = optimizer.engine.gradient("0.weight").clone()
    assert optimizer.step().applied
    F.cross_entropy(reference(data[:8][0].double()), data[:8][1]).backward()
    assert torch.allclose(gradient.double(), reference[0].weight.grad, atol=1e-6)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    with optimizer.gather_parameters():
        assert distance(model, reference) < 1e-6


def test_offloaded_states_change_no_bit():
    data, seen = rows(8), []
    for offload in (None, {"optimizer": "host"}):
        model = network()
        optimizer = poise.ZeROOptimizer(2, offload).over(
            model, {"optimizer": {"type": "adamw", "lr": 0.01}}
        )
        optimizer.engine.backward(F.cross_entropy(model(data[:8][0]), data[:8][1]), tokens=8)
        result = optimizer.step()
        assert (result.host_bytes > 0) == (offload is not None)
        seen.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_what_they_cannot_mean_is_an_error():
    with pytest.raises(poise.Error, match="use fp32, bf16 or fp16"):
        poise.MixedPrecisionTrainer("int8")
    with pytest.raises(poise.Error, match="loss_scale with bf16"):
        poise.MixedPrecisionTrainer("bf16", loss_scale=2.0)
    with pytest.raises(poise.Error, match="checkpoint_every_n is 0"):
        poise.ActivationCheckpoint(0)
    with pytest.raises(poise.Error, match="accumulation_steps is 0"):
        poise.GradientAccumulationSystem({"accumulation_steps": 0})
