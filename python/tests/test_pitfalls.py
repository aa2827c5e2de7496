"""What goes wrong in other trainers, by the behaviour that is right; the reports are named beside it."""

import math
import time

import poise
import pytest
import torch
import torch.nn.functional as F
from hf_models import causal_rows, counted, made
from poise import trainer_data
from poise.run_length import RunLength
from test_hf_trainer import arguments, losses
from torch import nn
from torch.utils.data import DataLoader
from wrapped_loops import distance, network, plain, rows

pytestmark = pytest.mark.usefixtures("one_thread")


# Windows and updates.


@pytest.mark.parametrize("accumulation", range(1, 8))
def test_an_epoch_has_every_batch_once_in_ceil_many_windows(accumulation, tmp_path):
    # transformers 37777 and 39659: another number of updates, batches left out.
    for length in range(1, 21):
        args = arguments(
            tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=accumulation
        )
        data = [{"x": torch.tensor(i)} for i in range(length)]
        run = RunLength.of(trainer_data.batches_per_epoch(data, args), args)
        assert run.updates == run.updates_per_epoch == math.ceil(length / accumulation)
        windows, seen = trainer_data.train_windows(data, args), []
        for window, _ in zip(windows, range(run.updates), strict=False):
            assert windows.epoch == 0
            seen += [int(batch["x"]) for batch in window]
        assert sorted(seen) == list(range(length))


def test_all_epochs_asked_for_are_trained(tmp_path):
    # transformers 33455, 31677: the run stopped before.
    args = arguments(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, num_train_epochs=3
    )
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(5))
    output = trainer.train()
    assert output.global_step == 9 and output.metrics["epoch"] == 3
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert len(rates) == 9 and rates[-1] == pytest.approx(1e-2 / 9)  # the schedule's end, once


def test_an_epoch_shorter_than_a_window_is_one_update(tmp_path):
    # Lightning 21808.
    args = arguments(tmp_path, gradient_accumulation_steps=8, num_train_epochs=2)
    trainer = poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(4))
    assert trainer.train().global_step == 2


def test_a_run_of_max_steps_makes_that_many_whatever_the_epochs(tmp_path):
    # Lightning 19684.
    args = arguments(tmp_path, max_steps=5)
    assert poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(11)).train().global_step == 5


def test_the_logged_loss_is_that_of_the_big_batch_whatever_the_window(tmp_path):
    # transformers 34263, 35556, 35204: sums, or 5 to 10 times as much.
    data, seen = causal_rows(8), []
    with torch.no_grad():
        model = made("gpt2").double()
        total = sum(counted("gpt2", row) for row in data)
        expected = sum(
            float(model(**{k: v[None] for k, v in row.items()}).loss) * counted("gpt2", row)
            for row in data
            if counted("gpt2", row)
        )
    for size in (1, 2, 8):
        args = arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
        )
        trainer = poise.Trainer(made("gpt2"), args, train_dataset=data)
        trainer.train()
        seen += losses(trainer)
    assert seen == pytest.approx([expected / total] * 3, rel=1e-5)


def test_an_evaluation_does_not_depend_on_its_batch_size(tmp_path):
    # transformers 39241: a mean of means.
    data, seen = causal_rows(7), []
    for size in (1, 3, 7):
        args = arguments(tmp_path, per_device_eval_batch_size=size)
        seen.append(poise.Trainer(made("gpt2"), args, eval_dataset=data).evaluate()["eval_loss"])
    assert seen == pytest.approx([seen[0]] * 3, rel=1e-6)


# Clipping.


def test_a_window_is_clipped_once_not_each_micro_batch():
    # transformers 1563, lingua 59: two gradients of norm 2 at right angles, clipped at 1 each,
    # would add up to a mean of norm 0.71.
    weight = nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(weight.parameters(), lr=1.0)
    before = weight.weight.detach().clone()
    run, sgd, *_ = poise.wrap(weight, sgd, accumulation=2)
    for direction in ([2.0, 0.0], [0.0, 2.0]):
        run.backward(run(torch.tensor([direction])).sum(), tokens=1)
        norm = run.clip_grad_norm_(weight.parameters(), 1.0)
        sgd.step()
    assert float(norm) == pytest.approx(math.sqrt(2))
    moved = before - weight.weight.detach()
    assert float(moved.norm()) == pytest.approx(1.0, rel=1e-5)


def test_the_reported_norm_is_that_of_the_gradient_before_clipping(tmp_path):
    # trl 2456; DeepSpeed 6767.
    data = rows(8)
    model, reference = network(), network(dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run, sgd, _, loader = poise.wrap(
        model, sgd, None, DataLoader(data, batch_size=2), accumulation=4
    )
    (expected,) = plain(
        reference, torch.optim.SGD(reference.parameters(), lr=0.1), [data[:8]], max_norm=0.1
    )
    for x, y in loader:
        run.backward(F.cross_entropy(run(x), y))
        run.clip_grad_norm_(0.1)
        sgd.step()
    assert run.last_result.grad_norm == pytest.approx(expected, rel=1e-5)
    assert run.last_result.clipped_norm == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("size", [1e20, 1e38, 1e-30])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_whose_squares_leave_fp32_is_clipped_all_the_same(dtype, size):
    # pytorch 46849, 53843, 55169: a norm of infinity, which made all gradients 0 or NaN.
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings = {
        "precision": {"dtype": dtype, "parameters": dtype},
        "optimizer": {"type": "sgd", "lr": 1.0, "max_grad_norm": 1.0},
    }
    row = torch.full((1, 4), size).to(getattr(torch, "bfloat16" if dtype == "bf16" else "float32"))
    result = poise.Engine(model, settings).step([row] * 3, lambda x: (model(x).sum(), 1))
    norm = 2 * float(row[0, 0].double())
    assert result.applied and result.grad_norm == pytest.approx(norm, rel=1e-6)
    expected = -float(row[0, 0].double()) / max(1.0, norm)
    assert model.weight.detach().flatten().tolist() == pytest.approx([expected] * 4, rel=1e-2)


def test_many_small_parameters_take_no_longer_than_in_torch():
    # pytorch 134191; DeepSpeed 2879, 8586: most of a step was work of the host, for each parameter.
    def parameters(count):
        return nn.ParameterList(nn.Parameter(torch.ones(5)) for _ in range(count))

    def least(call):
        def once():
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return min(once() for _ in range(4))

    def of_poise(count):
        model = parameters(count)
        engine = poise.Engine(model, {"optimizer": {"type": "adamw"}})
        return least(lambda: engine.step([0], lambda _: (torch.cat([*model]).square().mean(), 1)))

    model = parameters(2000)
    adam = torch.optim.AdamW(model.parameters())

    def step():
        adam.zero_grad()
        torch.cat([*model]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    assert of_poise(2000) < least(step)  # about a seventh
    assert of_poise(4000) < 4 * of_poise(1000) * 2


# Precision and loss scale.


def half(model, **precision):
    return poise.Engine(
        model,
        {
            "precision": {"dtype": "fp16", **precision},
            "optimizer": {"type": "sgd", "lr": 1.0, "max_grad_norm": 0.0},
        },
    )


def test_an_update_at_which_the_scale_grows_is_a_whole_step():
    # DeepSpeed 2686, 8588: unscaled with the doubled scale, half a step.
    model = nn.Linear(1, 1, bias=False)
    engine = half(model, initial_loss_scale=64.0, loss_scale_growth_interval=1)
    before = float(model.weight.detach())
    for update in range(1, 4):
        result = engine.step([torch.ones(1, 1)], lambda x: (model(x).sum(), 1))
        assert engine.loss_scale == 64 * 2**update
        assert result.grad_norm == 1
        assert float(model.weight.detach()) == pytest.approx(before - update, abs=1e-6)


def test_the_scale_recovers_from_fifty_overflows():
    # pytorch 40497: collapsed to nothing, and stayed there.
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    engine = half(model, loss_scale_growth_interval=2, min_loss_scale=8.0)
    for _ in range(50):  # a finite loss, whose gradient overflows at every scale from 2 on
        result = engine.step([torch.full((1, 1), 6e4)], lambda x: (model(x).sum(), 1))
        assert not result.applied and math.isfinite(result.loss)
    assert engine.loss_scale == 8
    for _ in range(4):
        assert engine.step([torch.ones(1, 1)], lambda x: (model(x).sum(), 1)).applied
    assert engine.loss_scale == 32


def test_fifty_updates_of_fp16_with_overflows_are_those_of_a_grad_scaler():
    # pytorch 88258, 96755: infinities and the scale, inside of a fused update.
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def adam(model):
        groups = [
            {"params": [p for p in model.parameters() if p.dim() == n + 1], "weight_decay": decay}
            for n, decay in enumerate((0.0, 0.1))
        ]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)

    model, plain, exact = build(), build(), build().double()
    settings = {
        "precision": {
            "dtype": "fp16",
            "initial_loss_scale": 1024.0,
            "loss_scale_growth_interval": 5,
        },
        "optimizer": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.0},
    }
    engine = poise.Engine(model, settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    of_plain, of_exact, skipped = adam(plain), adam(exact), []
    for update in range(50):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(update))
        factor = 1e6 if update in (3, 4, 17, 30) else 1.0
        result = engine.step([x], lambda x, f=factor: (model(x).float().square().mean() * f, 1))
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            y = plain(x)
        of_plain.zero_grad()
        scaler.scale(y.float().square().mean() * factor).backward()
        scaler.step(of_plain)
        scaler.update()
        assert engine.loss_scale == scaler.get_scale()
        if not result.applied:
            skipped.append(update)
            continue
        of_exact.zero_grad()
        (exact(x.double()).square().mean() * factor).backward()
        of_exact.step()
    assert skipped == [3, 4, 17, 30]
    assert distance(model, exact) <= 2 * distance(plain, exact)


def test_the_scale_counts_windows_not_micro_batches():
    # DeepSpeed 1107.
    model = nn.Linear(1, 1, bias=False)
    engine = half(model, initial_loss_scale=64.0, loss_scale_growth_interval=2)
    window = [torch.ones(1, 1)] * 4
    engine.step(window, lambda x: (model(x).sum(), 1))
    assert engine.loss_scale == 64
    engine.step(window, lambda x: (model(x).sum(), 1))
    assert engine.loss_scale == 128


def test_small_gradients_of_many_micro_batches_add_up_in_fp32():
    # trl 2175; DeepSpeed 2352: summed in bf16 they stall.
    model = nn.Linear(1, 1, bias=False)
    settings = {
        "batch": {"accumulation": 1024},
        "precision": {"dtype": "bf16", "parameters": "bf16"},
        "optimizer": {"type": "sgd", "lr": 1.0, "max_grad_norm": 0.0},
    }
    engine = poise.Engine(model, settings)
    small = torch.full((1, 1), 0.0009765625)  # 2^-10, exact in bf16
    for _ in range(1024):
        with engine.forward_scope():
            loss = model(small).sum()
        engine.backward(loss, tokens=1)
    engine.begin_update()
    assert float(engine.gradient("weight")) == 2**-10


def test_one_bad_gradient_leaves_parameters_and_moments_as_they_were():
    # DeepSpeed 8035: NaN in moments and masters, the run lost.
    data = rows(12)
    model, twin = network(), network()
    runs = []
    for one in (model, twin):
        adam = torch.optim.AdamW(one.parameters(), lr=0.01)
        runs.append(poise.wrap(one, adam))
    x, y = data[:4]
    for number in range(3):
        for index, (run, adam, *_) in enumerate(runs):
            if number == 1 and index == 1:
                continue
            factor = math.inf if number == 1 else 1.0
            run.backward(F.cross_entropy(run(x), y) * factor, tokens=4)
            adam.step()
    assert runs[0].model.last_result.skipped == 1
    assert distance(model, twin) == 0


# Data.


def test_one_batch_whose_labels_are_all_masked_counts_nothing(tmp_path):
    # nanochat 623, Automodel 1985: NaN.
    data = causal_rows(8)
    for row in data[2:4]:
        row["labels"] = torch.full_like(row["labels"], -100)
    with_it = poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=data)
    without = poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=data[:2] + data[4:])
    assert with_it.train().training_loss == pytest.approx(without.train().training_loss, rel=1e-6)
    for p, q in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)
