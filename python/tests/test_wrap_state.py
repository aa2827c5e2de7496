"""poise.wrap: state of the optimizer and of the loop, saved, loaded, wrapped again."""

import copy
import io

import poise
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from wrapped_loops import adamw, distance, network, plain, rows, wrapped

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_training_goes_on_from_a_plain_optimizer_and_back(kind):
    data = rows(48)
    windows = [data[i : i + 8] for i in range(0, 48, 8)]

    def optimizer(model):
        if kind == "adamw":
            return adamw(model)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    reference = network(dtype=torch.float64)
    plain(reference, optimizer(reference), windows)
    # Two updates in plain torch, two by the engine, two in plain torch again.
    model = network()
    first = optimizer(model)
    plain(model, first, windows[:2])
    middle = TensorDataset(*data[16:32])
    wrapped(model, first, None, DataLoader(middle, batch_size=4), accumulation=2)
    assert not first.state  # the engine has it
    state = copy.deepcopy(first.state_dict())
    assert len(state["state"]) == 4
    last_model = copy.deepcopy(network())
    last_model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()})
    last = optimizer(last_model)
    last.load_state_dict(state)
    plain(last_model, last, windows[4:])
    assert distance(last_model, reference) < 2e-6


@pytest.mark.parametrize("is_wrapped_before", [False, True])
def test_momentum_is_saved_again_before_the_first_update(is_wrapped_before):
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain(model, sgd, [rows(8)[:]])
    saved = copy.deepcopy(sgd.state_dict())
    if is_wrapped_before:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        poise.wrap(model, sgd)
        assert not sgd.state_dict()["state"]
        sgd.load_state_dict(saved)
    else:
        poise.wrap(model, sgd)
    again = sgd.state_dict()["state"]
    assert len(again) == 4
    for number, moments in saved["state"].items():
        assert torch.equal(again[number]["momentum_buffer"], moments["momentum_buffer"])


def test_state_of_a_wrapped_optimizer_loads_into_another():
    data = rows(32)
    reference, model = network(dtype=torch.float64), network()
    plain(reference, adamw(reference), [data[i : i + 8] for i in range(0, 32, 8)])
    _, _, run = wrapped(
        model, first := adamw(model), None, DataLoader(TensorDataset(*data[:16]), batch_size=8), 1
    )
    other = network(seed=5)
    second = adamw(other, lr=7.0, betas=(0.5, 0.6))
    run2, second, _, loader = poise.wrap(
        other, second, None, DataLoader(TensorDataset(*data[16:]), batch_size=8)
    )
    run2.load_state_dict(run.state_dict())
    second.load_state_dict(first.state_dict())
    for x, y in loader:
        run2.backward(F.cross_entropy(run2(x), y))
        second.step()
    assert distance(other, reference) < 2e-6
    assert run2.last_result.updates == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda o: None,
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=9),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2),
                torch.optim.lr_scheduler.MultiStepLR(o, [2]),
            ],
            [2],
        ),
    ],
)
def test_a_saved_loop_goes_on_as_if_nothing_had_been(make, tmp_path):
    data = rows(48)

    def begun():
        model = network()
        optimizer = adamw(model)
        return poise.wrap(model, optimizer, make(optimizer), accumulation=2)

    def train(loop, windows):
        model, optimizer, scheduler, _ = loop
        for x, y in windows:
            model.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

    pieces = [data[i : i + 4] for i in range(0, 48, 4)]
    whole, first, second = begun(), begun(), begun()
    train(whole, pieces)
    train(first, pieces[:6])
    path = first.model.save(tmp_path, user={"mine": "text"})
    loaded = second.model.load(tmp_path)
    assert (loaded.path, loaded.user["mine"]) == (path, "text")
    train(second, pieces[6:])
    for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert second.optimizer.param_groups[1]["lr"] == whole.optimizer.param_groups[1]["lr"]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_loop_that_is_wrapped_again_goes_on(kind, caplog):
    data = rows(32)
    windows = [data[i : i + 8] for i in range(0, 32, 8)]

    def begun(dtype=torch.float32):
        model = network(dtype=dtype)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, adamw(model) if kind == "adamw" else sgd

    model, optimizer = begun()
    reference, theirs = begun(torch.float64)
    steps = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (optimizer, theirs)]
    plain(reference, theirs, windows, steps[1])
    for half in (data[:16], data[16:]):
        loader = DataLoader(TensorDataset(*half), batch_size=4)
        wrapped(model, optimizer, steps[0], loader, accumulation=2)
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert distance(model, reference) < 2e-6
    assert not caplog.records


def test_a_loop_that_was_left_within_a_window_keeps_its_schedule_when_it_is_wrapped_again():
    data, model = rows(8), network()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    halves = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    for micro_batches in (
        1,
        4,
    ):  # the first loop ends with half a window: an exception, a cell run again
        run, *_ = poise.wrap(model, sgd, halves, accumulation=2)
        for x, y in [data[:4]] * micro_batches:
            run.backward(F.cross_entropy(run(x), y))
            sgd.step()
            halves.step()
    assert sgd.param_groups[0]["lr"] == 0.25


def test_a_state_that_does_not_fit_changes_nothing():
    data = rows(8)

    def begun():
        model = network()
        return poise.wrap(model, adamw(model))

    def train(loop):
        for x, y in (data[:4], data[4:]):
            loop.model.backward(F.cross_entropy(loop.model(x), y))
            loop.optimizer.step()

    whole, disturbed = begun(), begun()
    train(whole)
    train(disturbed)
    other = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = adamw(other)
    F.cross_entropy(other(data[:][0]), data[:][1]).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    with pytest.raises(poise.Error, match=r"exp_avg of '2.weight' has shape \(4, 16\)"):
        disturbed.optimizer.load_state_dict(optimizer.state_dict())
    assert not disturbed.optimizer.state
    train(whole)
    train(disturbed)
    for p, q in zip(disturbed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_moments_of_16_bit_parameters_come_back_as_they_were(dtype):
    data = rows(8)

    def begun():
        model = network()
        precision = {"dtype": dtype, "parameters": dtype}
        config = {"precision": precision, "engine": {"on_nonfinite": "skip"}}
        return poise.wrap(model, adamw(model), config=config)

    first, second = begun(), begun()
    for _ in range(3):
        first.model.backward(F.cross_entropy(first.model(data[:][0]), data[:][1]) * 1e-3)
        first.optimizer.step()
    saved = first.optimizer.state_dict()
    second.optimizer.load_state_dict(copy.deepcopy(saved))
    back = second.optimizer.state_dict()
    for number, moments in saved["state"].items():
        for name, value in moments.items():
            assert torch.equal(back["state"][number][name], value), name
            assert name == "step" or (value.dtype == torch.float32 and value.any())


@pytest.mark.parametrize(
    "make",
    [
        lambda s, o: s.LambdaLR(o, lambda n: 1 / (n + 1)),
        lambda s, o: s.CosineAnnealingLR(o, T_max=10),
        lambda s, o: s.OneCycleLR(o, max_lr=0.02, total_steps=9),
        lambda s, o: s.SequentialLR(o, [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.8)], [2]),
        lambda s, o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.8)]),
    ],
)
def test_states_saved_with_torch_go_on_as_if_nothing_had_been(make):
    data = rows(24)

    def begun(seed=0):
        optimizer = adamw(model := network(seed))
        scheduler = make(torch.optim.lr_scheduler, optimizer)
        return poise.wrap(model, optimizer, scheduler, accumulation=2)

    def train(loop, pieces):
        rates = []
        for x, y in pieces:
            loop.model.backward(F.cross_entropy(loop.model(x), y))
            loop.optimizer.step()
            loop.scheduler.step()
            rates += [(g["lr"], g["betas"]) for g in loop.optimizer.param_groups]
        return rates

    pieces = [data[i : i + 2] for i in range(0, 24, 2)]
    whole, first, second = begun(), begun(), begun(seed=7)
    train(whole, pieces[:6])
    train(first, pieces[:6])
    for was, new in zip(first[:3], second[:3], strict=True):
        file = io.BytesIO()
        torch.save(was.state_dict(), file)
        file.seek(0)
        new.load_state_dict(torch.load(file))
    rates = train(second, pieces[6:])
    assert rates == train(whole, pieces[6:]) and len(set(rates)) >= 4
    for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)
