"""poise.Engine from Python: what it takes, what it refuses, and what it leaves behind."""

import gc
import json
import logging
import os
import signal
import threading
import time

import poise
import pytest
import torch
from plain_loop import Recipe, settings
from poise import model_view
from poise.loss import loss_parts
from poise.status import Status
from tiny_models import TinyForCausalLM, batch, counted, same_bits, split, tiny
from torch import nn

WINDOW = split(batch(8, 12, seed=1), 2)


def engine_of(model, recipe=None, **sections):
    return poise.Engine(model, settings(recipe or Recipe(), **sections))


def step(engine, window=WINDOW):
    return engine.step(window, lambda piece: (engine.model(**piece), counted(piece)))


# What comes back.


def test_result_has_every_field():
    result = step(engine_of(tiny()))
    assert result.status is Status.APPLIED and result.status == "applied" and result.applied
    assert result.micro_batches == 4 and result.updates == 1 and result.skipped == 0
    assert result.tokens == 8 * 11
    assert result.lr == 1e-2 and result.loss_scale == 1
    assert 0 < result.clipped_norm <= result.grad_norm
    assert result.clipped_norm == pytest.approx(min(0.5, result.grad_norm), rel=1e-5)
    seconds = result.forward_seconds, result.backward_seconds, result.update_seconds
    assert min(seconds) > 0 and sum(seconds) <= result.total_seconds * 1.001
    assert sum(result.accounts.values()) == result.peak_bytes > 0
    assert "status=applied" in repr(result)


def test_memory_is_told_by_account():
    model = tiny()
    engine = engine_of(model)
    step(engine)
    memory = engine.memory()
    numel = sum(
        -(-p.numel() // 256) * 256 for p in model.parameters()
    )  # each starts at a multiple of 256
    assert memory["current"]["parameters"] == 4 * numel
    assert memory["current"]["optimizer"] == 8 * numel
    assert memory["own_peak"]["activations"] > 0
    assert sum(memory["at_peak"].values()) == memory["peak_bytes"]


def test_parameters_keep_identity_and_grad_stays_empty():
    model = tiny()
    before = {name: id(p) for name, p in model.named_parameters()}
    step(engine_of(model))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())


def test_gradient_is_the_mean_and_may_be_written():
    whole = batch(8, 12, seed=1)
    model, reference = tiny(), tiny().double()
    expected = torch.autograd.grad(reference(**whole), reference.head.weight)[0]
    engine = engine_of(model, Recipe(max_grad_norm=0))
    for piece in WINDOW:
        engine.backward(engine(**piece), tokens=counted(piece))
    engine.begin_update()
    torch.testing.assert_close(
        engine.gradient("head.weight").double(), expected, rtol=1e-5, atol=1e-8
    )
    assert torch.equal(engine.gradient(model.head.weight), engine.gradient("head.weight"))
    for name, _ in model.named_parameters():
        engine.gradient(name).zero_()
    assert engine.step().grad_norm == 0


def test_edits_of_parameters_are_kept():
    model = tiny()
    engine = poise.Engine(model, settings(Recipe(parameters=torch.bfloat16, lr=0.0)))
    with torch.no_grad():
        model.head.bias.fill_(0.5)
    model.embedding.weight.data.fill_(0.25)
    engine.refresh(model.embedding.weight)
    step(engine)
    assert (engine.master("head.bias") == 0.5).all()
    assert (engine.master("embedding.weight") == 0.25).all()


# Units.


def test_units_are_the_repeated_blocks():
    assert engine_of(tiny()).units[:2] == ["blocks.0", "blocks.1"]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert [name for name, _ in model_view.find_units(model)] == ["0", "1", "2"]


def test_a_model_cut_down_to_one_layer_has_a_block():
    """As for a quick look, where transformers' own checkpointing works, too."""
    model = TinyForCausalLM(layers=1)
    assert [name for name, _ in model_view.find_units(model)] == ["blocks.0"]
    engine = engine_of(model, checkpointing={"policy": "every_n"})
    runs = []
    handle = model.blocks[0].up.register_forward_hook(lambda *_: runs.append(1))
    engine.step([batch(2, 5, seed=1)], lambda piece: (model(**piece), 1))
    handle.remove()
    assert len(runs) == 2  # once more in backward


@pytest.mark.parametrize(
    "around",
    [
        {"checkpointing": {"policy": "every_n"}},
        {
            "offload": {
                "activations": "host",
                "activation_units": ["blocks.*"],
                "activation_min_bytes": 0,
            }
        },
    ],
)
def test_a_second_engine_for_a_model_takes_it_over(around):
    """As a second Trainer makes one, whether the first is still there or not."""
    model = tiny()
    piece = batch(2, 5, seed=1)

    def forwards(engine):
        runs = []
        handle = model.blocks[0].up.register_forward_hook(lambda *_: runs.append(1))
        engine.step([piece], lambda batch: (model(**batch), 1))
        handle.remove()
        return len(runs), engine.memory()["own_peak"]["activations"]

    plain = forwards(engine_of(model))
    first = engine_of(model, **around)
    changed = forwards(first)
    assert changed != plain
    second = engine_of(model, **around)
    assert forwards(second) == changed
    assert forwards(engine_of(model)) == plain
    with pytest.raises(poise.Error, match="no longer lives in poise's memory"):
        forwards(first)


class Holder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight) if not isinstance(weight, nn.Parameter) else weight


class Net(nn.Module):
    def __init__(self, with_blocks, with_stem):
        super().__init__()
        if with_stem:
            self.stem = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if with_blocks:
            self.blocks = nn.ModuleList(Holder(torch.ones(4, 4)) for _ in range(3))
        self.head = nn.Linear(64, 64)


def tied_beside_larger():
    tied = nn.Parameter(torch.ones(8, 8))  # 64 elements, not 128
    lists = [nn.ModuleList(map(Holder, pair)) for pair in
             ((tied, tied), (torch.ones(9, 9), torch.ones(1)))]  # fmt: skip
    return nn.ModuleList([*lists, nn.Linear(1, 1)])


@pytest.mark.parametrize(
    "model, expected",
    [
        (Net(True, True), ["blocks.0", "blocks.1", "blocks.2"]),
        (Net(False, True), ["pair.0", "pair.1"]),
        (Net(True, False), ["blocks.0", "blocks.1", "blocks.2"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
        (
            nn.ModuleList([nn.Linear(64, 64), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])]),
            ["1.0", "1.1"],
        ),
        (tied_beside_larger(), ["1.0", "1.1"]),
        (nn.Sequential(nn.ReLU(), nn.ReLU()), []),
        (nn.Linear(4, 4), []),
    ],
)
def test_units_are_those_of_cpp(model, expected):
    # tests/engine/view_test.cpp has the same structures and names.
    units = model_view.unit_parameters(model, model_view.find_units(model))
    assert [name for name, _ in units] == expected


def test_units_by_class_and_name():
    model = tiny()
    for choice in (["Block"], [type(model.blocks[0])], ["blocks.*"]):
        assert [name for name, _ in model_view.find_units(model, choice)] == [
            "blocks.0",
            "blocks.1",
        ]
    with pytest.raises(
        poise.Error, match="no module of the model is a unit Blok; its classes are Block"
    ):
        model_view.find_units(model, ["Blok"])


def test_tied_parameter_is_listed_by_each_unit_that_uses_it():
    model = tiny()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    units = dict(model_view.unit_parameters(model, model_view.find_units(model)))
    assert "blocks.0.up.weight" in units["blocks.0"]
    assert "blocks.1.up.weight" in units["blocks.1"]
    step(engine_of(model))  # it lives in the first one


# The three-call form and the window.


def test_boundary_and_early_step():
    engine = engine_of(tiny())
    for i, piece in enumerate(WINDOW):
        assert engine.micro_batches == i
        with pytest.raises(poise.Error):
            engine.step()
        engine.backward(engine(**piece), tokens=counted(piece))
    assert engine.is_boundary()
    engine.step()
    assert engine.micro_batches == 0 and engine.updates == 1


def test_discarded_window_leaves_nothing():
    model, fresh = tiny(), tiny()
    engine = engine_of(model)
    engine.backward(engine(**WINDOW[0]) * 100, tokens=3)
    engine.discard_window()
    step(engine)
    step(engine_of(fresh))
    assert same_bits(model, fresh)


def test_without_a_loss_function_the_model_returns_the_loss():
    assert engine_of(tiny()).step(WINDOW).applied


# Bad input, in words.


def test_what_is_no_loss_is_refused():
    engine = engine_of(tiny())
    for result, words in [
        (3.0, "returned 3.0"),
        (None, "returned None"),
        ({"logits": torch.ones(2)}, "without 'loss' but logits"),
        ((torch.ones(()), torch.ones(3)), "a tuple must be"),
        (torch.ones(3, requires_grad=True), r"shape \(3,\)"),
        (torch.tensor(3), "of type Long; return a floating point tensor"),
        (poise.Loss(torch.ones((), requires_grad=True), count=[3]), "count"),
        (poise.Loss(torch.ones((), requires_grad=True), kind="median"), "median"),
    ]:
        with pytest.raises(poise.Error, match=words):
            engine.step([None], lambda _, result=result: result)
    assert step(engine).applied


def test_model_output_and_attribute_forms():
    class Output(dict):
        def __getattr__(self, name):
            return self[name]

    loss = torch.ones((), requires_grad=True)
    assert loss_parts(Output(loss=loss, logits=None))[0] is loss
    assert loss_parts(loss, tokens=3)[2] == 3
    assert loss_parts((loss, 5), tokens=3)[2] == 5


def test_loss_without_grad():
    engine = engine_of(tiny())
    with pytest.raises(poise.Error, match="grad"):
        engine.step(WINDOW, lambda piece: (engine.model(**piece).detach(), 3))
    with torch.no_grad(), pytest.raises(poise.Error, match="grad"):
        engine.backward(engine(**WINDOW[0]), tokens=3)


@pytest.mark.parametrize("window", [[], iter([])])
def test_window_without_micro_batches(window):
    with pytest.raises(poise.Error, match="micro-batch"):
        engine_of(tiny()).step(window, lambda piece: piece)


def test_batch_given_as_window():
    with pytest.raises(poise.Error, match="list of micro-batches"):
        engine_of(tiny()).step(WINDOW[0], lambda piece: piece)


def test_models_that_cannot_be_trained():
    with pytest.raises(poise.Error, match="trainable"):
        poise.Engine(tiny().requires_grad_(False))
    with pytest.raises(poise.Error, match="Module"):
        poise.Engine(lambda x: x)
    overlapping = nn.Linear(4, 4, bias=False)
    overlapping.part = nn.Parameter(overlapping.weight.detach()[1:3])
    with pytest.raises(poise.Error, match="overlap"):
        poise.Engine(overlapping)


def test_settings_in_every_form(tmp_path):
    text = json.dumps(settings(Recipe()))
    path = tmp_path / "run.json"
    path.write_text("// a comment\n" + text)
    configs = [
        poise.Engine(tiny(), form).config for form in (settings(Recipe()), text, path, str(path))
    ]
    assert all(config == configs[0] for config in configs)
    assert poise.Engine(tiny(), configs[0]).config == configs[0]
    with pytest.raises(poise.Error, match="optimizer.lr"):
        poise.Engine(tiny(), {"optimizer": {"learning_rat": 1}})


def updated(engine, by):
    if by == "step":
        return step(engine)
    for piece in WINDOW:
        engine.backward(engine(**piece), counted(piece))
    return engine.step()


@pytest.mark.parametrize("by", ["step", "backward"])
def test_what_is_freed_later_is_named(by):
    model = tiny()
    name, parameter = list(model.named_parameters())[1]
    parameter.requires_grad_(False)
    engine = engine_of(model)

    def update():
        return updated(engine, by)

    assert update().applied
    before = {n: v.clone() for n, v in model.state_dict().items()}
    parameter.requires_grad_(True)
    with pytest.raises(poise.Error, match=f"parameter '{name}' was frozen when.*freeze it after"):
        update()
    assert engine.micro_batches == 0
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    parameter.requires_grad_(False)  # set back, it goes on
    assert update().updates == 2
    parameter.requires_grad_(True)
    engine = engine_of(model)  # anew: what is trained now moves
    before = parameter.detach().clone()
    assert update().applied and not torch.equal(parameter, before)


def resized(model):
    model.embedding = nn.Embedding(*model.embedding.weight.shape)


def replaced(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def added(model):
    model.blocks[0].register_parameter("adapter", nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("by", ["step", "calls"])
@pytest.mark.parametrize(
    ("change", "name"),
    [(resized, "embedding.weight"), (replaced, "head.weight"), (added, "blocks.0.adapter")],
)
def test_a_parameter_that_came_later_is_named(change, name, by):
    # transformers 25241: a table that was resized after the engine was made; here it never trained.
    model = tiny()
    engine = engine_of(model)

    def update():
        return updated(engine, by)

    assert update().applied
    change(model)
    with pytest.raises(poise.Error, match=f"parameter '{name}' came into the model after"):
        update()
    assert engine.micro_batches == 0
    dict(model.named_parameters())[name].requires_grad_(False)
    assert update().applied
    dict(model.named_parameters())[name].requires_grad_(True)
    engine = engine_of(model)
    assert update().applied


def test_unknown_parameter_names_the_nearest():
    engine = engine_of(tiny())
    with pytest.raises(poise.Error, match=r"head\.weight"):
        engine.master("head.wieght")
    with pytest.raises(poise.Error, match="no parameter of the model"):
        engine.refresh(torch.ones(2))


def test_sparse_gradients_are_summed_as_dense_ones(caplog):
    class Bag(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 4, sparse=sparse)

        def forward(self, ids):
            return self.table(ids).square().mean()

    sparse, dense = Bag(True), Bag(False)
    with caplog.at_level(logging.INFO, logger="poise"):
        for model in (sparse, dense):
            poise.Engine(model, settings(Recipe())).step(
                [torch.arange(6), torch.arange(3, 9)], lambda ids, model=model: (model(ids), 6)
            )
    assert torch.equal(sparse.table.weight, dense.table.weight)
    assert [r.getMessage() for r in caplog.records if "sparse" in r.getMessage()] == [
        "the gradient of parameter 'table.weight' is sparse; sparse gradients are made dense "
        "(said once)"
    ]


# Non-finite values.


def test_nonfinite_loss_changes_nothing():
    model = tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = engine_of(model)
    result = engine.step(WINDOW, lambda piece: (model(**piece) * float("nan"), counted(piece)))
    assert result.status == "nonfinite_loss" and result.skipped == 1 and engine.updates == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_nonfinite_gradient_names_the_parameter():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.good = nn.Parameter(torch.ones(3))
            self.bad = nn.Parameter(torch.zeros(3))

        def forward(self):
            return self.good.sum() + self.bad.sqrt().sum()  # the slope of a root at 0 is infinite

    result = engine_of(Root()).step([()], None)
    assert result.status == "nonfinite_gradient" and result.first_bad_parameter == "bad"
    with pytest.raises(poise.Error, match="bad"):
        engine_of(Root(), engine={"on_nonfinite": "stop"}).step([()], None)


def test_window_that_counts_nothing_is_empty():
    engine = engine_of(tiny())
    masked = [{**piece, "labels": torch.full_like(piece["labels"], -100)} for piece in WINDOW]
    result = step(engine, masked)
    assert result.status == "empty" and engine.updates == 0
    assert step(engine).applied


# Errors of the user's code, signals, threads.


class Refusal(Exception):
    pass


def test_exception_keeps_its_type_and_the_engine_its_state():
    model, fresh = tiny(), tiny()
    engine = engine_of(model)

    def loss(piece):
        if piece is WINDOW[2]:
            raise Refusal("no more")
        return model(**piece), counted(piece)

    with pytest.raises(Refusal, match="no more"):
        engine.step(WINDOW, loss)
    assert engine.micro_batches == 0
    step(engine)
    step(engine_of(fresh))
    assert same_bits(model, fresh)


def test_exception_in_backward_keeps_its_type():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise Refusal("in backward")

    model, fresh = tiny(), tiny()
    engine = engine_of(model)
    with pytest.raises(Refusal, match="in backward"):
        engine.step(WINDOW, lambda piece: (Failing.apply(model(**piece)), counted(piece)))
    step(engine)
    step(engine_of(fresh))
    assert same_bits(model, fresh)


def test_interrupt_during_a_step_discards_the_window():
    model, fresh = tiny(), tiny()
    engine = engine_of(model)
    done = []

    def loss(piece):
        done.append(piece)
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return model(**piece), counted(piece)

    with pytest.raises(KeyboardInterrupt):
        engine.step(WINDOW, loss)
    assert len(done) == 2 and engine.micro_batches == 0
    step(engine)
    step(engine_of(fresh))
    assert same_bits(model, fresh)


def test_other_threads_run_during_a_long_step():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8_000_000))

        def forward(self):
            return self.weight[:1].sum()

    engine = engine_of(Large())
    engine.step([()])
    ticks, running = [], threading.Event()

    def tick():
        while not running.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    updates = []
    for _ in range(20):
        seconds = engine.step([()]).update_seconds  # one C++ call, no Python inside
        updates.append((time.perf_counter() - seconds, time.perf_counter()))
    running.set()
    thread.join()
    during = sum(begin < tick < end for tick in ticks for begin, end in updates)
    # Held, the lock would let in one tick at most between two calls.
    assert during > 1.5 * len(updates)


@pytest.fixture
def old_objects_left_alone():
    """What other tests have imported is not collected a hundred times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("old_objects_left_alone")
def test_fifty_engines_leave_nothing():
    def use():
        model = tiny(dropout=0.1)
        engine = engine_of(model, checkpointing={"policy": "every_n"})
        step(engine)
        held = engine.memory()["current_bytes"]
        del engine
        gc.collect()
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        wrapped = sum("forward" in vars(m) for m in model.modules())
        return held, hooks, wrapped

    def census():
        gc.collect()
        tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        return tensors, threading.active_count(), len(os.listdir("/proc/self/task"))

    first = use()
    before = census()
    assert all(use() == first for _ in range(50))
    assert first[1:] == (0, 0)
    assert census() == before


def test_model_outlives_its_engine():
    model = tiny()
    step(engine_of(model))
    gc.collect()
    model(**WINDOW[0]).backward()
    assert model.head.weight.grad is not None
