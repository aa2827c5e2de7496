"""poise.wrap: a torch loop keeps its optimizer, scheduler and state, and trains by an engine."""

import difflib
import importlib.util
import logging
from pathlib import Path

import poise
import pytest
import torch
import torch.nn.functional as F
from poise.marked_loader import MarkedLoader
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from wrapped_loops import adamw, distance, network, plain, rows, wrapped

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The example.


def test_the_example_changes_four_lines_and_nothing_else():
    before, after = (
        (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2].splitlines()
        for name in ("plain_loop", "plain_loop_with_poise")
    )
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 1 <= len(changed) <= 4, changed
    assert len(before) + 2 >= len(after)  # the import and the call


def test_the_example_learns_as_the_plain_loop_does(capsys):
    reference = load("plain_loop").main()
    # The same updates: micro-batches of a quarter, four of them in a window.
    losses = load("plain_loop_with_poise").main(batch_size=8)
    first = [sum(losses[i : i + 4]) / 4 for i in range(0, 44, 4)]
    assert first == pytest.approx(reference[:11], rel=1e-5)
    assert "loss" in capsys.readouterr().out


# The same training as torch's own.


@pytest.mark.parametrize("size", [1, 3, 4])
def test_groups_settings_and_clipping_are_the_optimizers(size):
    data = rows(20)  # windows of 12 and of 8 samples
    windows = [data[:12], data[12:]]
    reference = network(dtype=torch.float64)
    norms = plain(reference, adamw(reference), windows, max_norm=0.5)
    torch_too = network()
    plain(torch_too, adamw(torch_too), windows, max_norm=0.5)
    model = network()
    loader = DataLoader(data, batch_size=size)
    ours, _, _ = wrapped(model, adamw(model), None, loader, accumulation=12 // size, max_norm=0.5)
    assert ours == pytest.approx(norms, rel=1e-5)
    assert distance(model, reference) <= max(2 * distance(torch_too, reference), 2e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    ],
)
def test_every_known_optimizer_trains_as_torchs(make):
    data = rows(32)
    windows = [data[i : i + 8] for i in range(0, 32, 8)]
    reference, model = network(dtype=torch.float64), network()
    plain(reference, make(reference.parameters()), windows)
    wrapped(model, make(model.parameters()), None, DataLoader(data, batch_size=4), accumulation=2)
    assert distance(model, reference) < 1e-6


def test_nothing_is_clipped_unasked():
    data = rows(8)
    reference, model = network(dtype=torch.float64), network()
    with torch.no_grad():
        for p in (*reference.parameters(), *model.parameters()):
            p.mul_(20)  # norms far above 1
    norms = plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [data[:8]])
    assert norms[0] > 1.5
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped(model, sgd, None, DataLoader(data, batch_size=4), accumulation=2)
    assert distance(model, reference) < 1e-6


def test_a_short_last_window_is_a_whole_update():
    # Peers divide it by the full number of micro-batches: half a step here.
    data = rows(10)
    reference, model = network(dtype=torch.float64), network()
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [data[:8], data[8:]])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped(model, sgd, None, DataLoader(data, batch_size=2), accumulation=4)
    assert distance(model, reference) < 1e-6


def test_a_window_never_reaches_into_the_next_epoch():
    data = rows(6)
    reference, model = network(dtype=torch.float64), network()
    windows = [data[:4], data[4:], data[:4], data[4:]]
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), windows)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, run = wrapped(model, sgd, None, DataLoader(data, batch_size=2), 2, epochs=2)
    assert run.last_result.updates == 4
    assert distance(model, reference) < 1e-6


def test_an_epoch_left_early_leaves_nothing_of_its_window():
    data = rows(8)
    reference, model = network(dtype=torch.float64), network()
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [data[:8]])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run, sgd, _, loader = poise.wrap(
        model, sgd, None, DataLoader(data, batch_size=2), accumulation=4
    )
    for x, y in loader:
        run.backward(F.cross_entropy(run(x), 2 - y))
        sgd.step()
        break
    for x, y in loader:
        run.backward(F.cross_entropy(run(x), y))
        sgd.step()
    assert distance(model, reference) < 1e-6


def test_tokens_weigh_by_what_the_loss_counted():
    # The labels of a batch are masked unevenly: a mean of means would be another number.
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    y[1:4] = -100
    reference, model = network(dtype=torch.float64), network()
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [(x, y)])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped(model, sgd, None, DataLoader(TensorDataset(x, y), batch_size=4), accumulation=2)
    assert distance(model, reference) < 1e-6
    by_hand = network()
    run, sgd, _, _ = poise.wrap(
        by_hand, torch.optim.SGD(by_hand.parameters(), lr=0.1), accumulation=2
    )
    for part in (slice(0, 4), slice(4, 8)):
        run.backward(F.cross_entropy(run(x[part]), y[part]), tokens=(y[part] != -100).sum())
        sgd.step()
    assert distance(by_hand, reference) < 1e-6


# Schedulers.


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4, eta_min=1e-3),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 0.5**n]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=9),  # moves beta1
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            ],
            [2],
        ),
    ],
)
def test_torchs_schedulers_step_once_per_update(make):
    data = rows(32)
    windows = [data[i : i + 8] for i in range(0, 32, 8)]
    reference, model = network(dtype=torch.float64), network()
    theirs, ours = adamw(reference), adamw(model)
    plain(reference, theirs, windows, make(theirs))
    wrapped(model, ours, make(ours), DataLoader(data, batch_size=2), accumulation=4)
    for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert (a["lr"], a["betas"]) == (b["lr"], b["betas"])
    assert distance(model, reference) < 2e-6


def test_a_scheduler_waits_while_updates_are_skipped():
    data, model = rows(8), network()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    step_down = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    run, sgd, step_down, _ = poise.wrap(model, sgd, step_down)
    for factor in (1.0, float("nan"), 1.0):
        run.backward(F.cross_entropy(run(data[:4][0]), data[:4][1]) * factor, tokens=4)
        sgd.step()
        step_down.step()
    assert run.last_result.skipped == 1
    assert sgd.param_groups[0]["lr"] == 0.25


def test_a_plateau_scheduler_steps_when_it_is_asked():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, factor=0.1)
    poise.wrap(model, sgd, plateau, accumulation=4)
    for metric in (1.0, 2.0):
        plateau.step(metric)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_scheduler_made_after_wrapping_reads_and_writes_the_same_groups():
    data, model = rows(4), network()
    run, sgd, _, _ = poise.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    for _ in range(2):
        run.backward(F.cross_entropy(run(data[:4][0]), data[:4][1]))
        sgd.step()
        scheduler.step()
    assert run.last_result.lr == 0.5


@pytest.mark.parametrize("loader", [False, True])
def test_a_scheduler_of_epochs_steps_where_a_window_is_open(loader):
    data, model = rows(6), network()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    step_down = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    batches = DataLoader(data, batch_size=2)
    given = batches if loader else None
    run, sgd, step_down, marked = poise.wrap(model, sgd, step_down, given, accumulation=2)
    for _ in range(3):
        for x, y in marked or batches:
            run.backward(F.cross_entropy(run(x), y))
            sgd.step()
        step_down.step()
    assert sgd.param_groups[0]["lr"] == 0.125


def test_a_scheduler_of_epochs_steps_after_an_update_that_was_skipped():
    data, model = rows(4), network()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    run, sgd, step_down, _ = poise.wrap(
        model, sgd, torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    )
    for factor in (1.0, float("nan")):
        run.backward(F.cross_entropy(run(data[:][0]), data[:][1]) * factor, tokens=4)
        sgd.step()
    step_down.step()
    assert sgd.param_groups[0]["lr"] == 0.5
    step_down.step()  # the update before it was skipped
    assert sgd.param_groups[0]["lr"] == 0.5


def test_a_schedule_is_stepped_ahead_before_the_first_update():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    _, sgd, step_down, _ = poise.wrap(
        model, sgd, torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5), accumulation=4
    )
    for _ in range(3):
        step_down.step()
    assert sgd.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("accumulation", [1, 2])
def test_zero_grad_drops_an_update_that_the_loop_leaves_out(accumulation):
    data, model, reference = rows(12), network(), network(dtype=torch.float64)
    pieces = [data[i : i + 4 // accumulation] for i in range(0, 12, 4 // accumulation)]
    run, sgd, _, _ = poise.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation=accumulation
    )
    for number, (x, y) in enumerate(pieces, 1):
        sgd.zero_grad()
        run.backward(
            F.cross_entropy(run(x), y) * (100 if accumulation < number <= 2 * accumulation else 1)
        )
        if number == 2 * accumulation:
            sgd.zero_grad()
            continue
        sgd.step()
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [data[:4], data[8:]])
    assert run.last_result.updates == 2
    assert distance(model, reference) < 1e-6


def test_hooks_around_a_step_run_once_for_each_update_that_is_applied():
    data, model = rows(4), network()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []

    def halve(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] /= 2

    def note(optimizer, args, kwargs):
        seen.append((optimizer, run.last_result.lr, run.last_result.updates))

    run, sgd, _, _ = poise.wrap(model, sgd, accumulation=2)
    sgd.register_step_pre_hook(halve)
    sgd.register_step_post_hook(note)
    everywhere = register_optimizer_step_post_hook(note)
    for factor in (1.0, 1.0, float("nan"), 1.0, 1.0, 1.0):
        run.backward(F.cross_entropy(run(data[:][0]), data[:][1]) * factor, tokens=4)
        sgd.step()
    everywhere.remove()
    assert seen == 2 * [(sgd, 0.5, 1)] + 2 * [(sgd, 0.125, 2)]


# Precision.


def test_bf16_forwards_and_a_loss_outside_of_the_model_in_fp32():
    data, model = rows(8), network()
    seen = []
    model[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    run, *_ = poise.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config={"precision": {"dtype": "bf16"}}
    )
    logits = run(data[:8][0])
    assert seen == [torch.bfloat16] and logits.dtype == torch.float32
    run.backward(F.cross_entropy(logits, data[:8][1]))
    assert run.step().applied


def test_accumulate_says_when_the_window_closes():
    data = rows(10)
    model = network()
    run, sgd, _, loader = poise.wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        None,
        DataLoader(data, batch_size=2),
        accumulation=2,
    )
    closes = []
    for x, y in loader:
        with run.accumulate(model):
            closes.append(run.sync_gradients)
            run.backward(F.cross_entropy(run(x), y))
            if run.sync_gradients:
                run.clip_grad_norm_(1.0)
            sgd.step()
    assert closes == [False, True, False, True, True]
    assert run.last_result.updates == 3


# The model behind it.


def test_it_is_the_model_in_all_else():
    model = network()
    run, *_ = poise.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert run.module is model and run.training
    assert run.eval() is run and not model.training
    assert list(run.parameters())[0] is model[0].weight
    with pytest.raises(AttributeError):
        run.no_such_thing  # noqa: B018


def test_what_the_optimizer_leaves_out_stays(caplog):
    data, model = rows(8), network()
    before = model[0].weight.detach().clone()
    with caplog.at_level(logging.WARNING, "poise"):
        run, sgd, *_ = poise.wrap(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert "0.weight" in caplog.text and "frozen" in caplog.text
    run.backward(F.cross_entropy(run(data[:8][0]), data[:8][1]))
    sgd.step()
    assert torch.equal(model[0].weight, before)


# Loaders.


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize("data", [list(range(5)), Stream()])
def test_a_loader_knows_its_last_batch(data):
    loader = MarkedLoader(DataLoader(data, batch_size=2))
    for _ in range(2):
        seen = [(batch.tolist(), loader.at_end) for batch in loader]
        assert seen == [([0, 1], False), ([2, 3], False), ([4], True)]
    assert loader.batch_size == 2
