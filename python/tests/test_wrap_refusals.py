"""poise.wrap: what it refuses, when it is called and later, with the reason."""

import copy
import math
import pickle

import poise
import pytest
import torch
import torch.nn.functional as F
from wrapped_loops import network, rows

pytestmark = pytest.mark.usefixtures("one_thread")


class Own(torch.optim.SGD):
    def step(self, closure=None):
        pass


class SameStep(torch.optim.SGD):
    pass


def optimizers():
    """What is refused, and a word of the reason."""

    def two_betas(model):
        a, b = model[0].parameters(), model[2].parameters()
        return torch.optim.AdamW([{"params": a}, {"params": b, "betas": (0.5, 0.9)}])

    return [
        (lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop; poise has kernels"),
        (lambda m: Own(m.parameters(), lr=0.1), "Own; poise has kernels"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "amsgrad=True"),
        (lambda m: torch.optim.SGD(m.parameters(), maximize=True), "maximize=True"),
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9, dampening=0.1),
            "dampening=0.1",
        ),
        (two_betas, "groups differ in betas"),
        (lambda m: torch.optim.SGD(network(9).parameters(), lr=0.1), "none of the model"),
        (lambda m: m, "the optimizer is Sequential"),
    ]


@pytest.mark.parametrize(("make", "reason"), optimizers())
def test_an_optimizer_without_a_kernel_is_refused(make, reason):
    model = network()
    with pytest.raises(poise.Error, match=reason):
        poise.wrap(model, make(model))


def test_a_subclass_with_torchs_own_step_is_that_optimizer():
    model = network()
    poise.wrap(model, SameStep(model.parameters(), lr=0.1))


def test_calls_that_would_do_something_else_are_refused():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run, *_ = poise.wrap(model, sgd)
    with pytest.raises(poise.Error, match="closure"):
        sgd.step(lambda: None)
    with pytest.raises(poise.Error, match="add_param_group"):
        sgd.add_param_group({"params": []})
    with pytest.raises(poise.Error, match="norm_type 1"):
        run.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(poise.Error, match="without 0.weight"):
        run.clip_grad_norm_(model[2].parameters(), 1.0)
    run.backward(F.cross_entropy(run(rows(4)[:4][0]), rows(4)[:4][1]))
    with pytest.raises(poise.Error, match="but not through a call of that"):
        F.cross_entropy(model(rows(4)[:4][0]), rows(4)[:4][1]).backward()


@pytest.mark.parametrize("through", ["by hand", "a state"])
@pytest.mark.parametrize(
    ("kind", "name", "value", "reason"),
    [
        ("AdamW", "amsgrad", True, "amsgrad=True.*no kernel.*set it to False"),
        ("AdamW", "maximize", True, "maximize=True"),
        ("AdamW", "betas", (0.5, 0.5), "groups differ in betas"),
        ("AdamW", "lr", math.nan, "lr=nan.*give a finite number"),
        ("AdamW", "lr", torch.tensor(math.inf), "lr=.*inf"),
        ("AdamW", "betas", (math.nan, 0.9), "betas"),
        ("SGD", "weight_decay", math.nan, "weight_decay=nan"),
        ("SGD", "dampening", 0.5, "dampening"),
        ("SGD", "nesterov", True, "nesterov=True now.*had nesterov=False.*set it back"),
        ("Adam", "decoupled_weight_decay", True, "decoupled_weight_decay=True now"),
    ],
)
def test_an_option_set_later_is_no_secret(kind, name, value, reason, through):
    def begun():
        model = network()
        groups = [{"params": part.parameters()} for part in (model[0], model[2])]
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(torch.optim, kind)(groups, lr=0.1, **more)

    model, optimizer = begun()
    run, *_ = poise.wrap(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    # Of both groups what must be the same in both; else of the second.
    changed = range(2) if name in ("nesterov", "decoupled_weight_decay", "dampening") else [1]
    run.backward(F.cross_entropy(run(rows(4)[:4][0]), rows(4)[:4][1]))
    if through == "by hand":
        was = [dict(group) for group in optimizer.param_groups]
        for number in changed:
            optimizer.param_groups[number][name] = value
        with pytest.raises(poise.Error, match=reason):
            optimizer.step()
        optimizer.param_groups[:] = was
    else:
        _, other = begun()
        for number in changed:
            other.param_groups[number][name] = value
        with pytest.raises(poise.Error, match=reason):
            optimizer.load_state_dict(other.state_dict())
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)
    optimizer.step()  # set back, it goes on
    assert run.last_result.applied


def through_wrap(model, optimizer):
    poise.wrap(model, optimizer)


def through_initialize(model, optimizer):
    config = {"train_micro_batch_size_per_gpu": 2}
    poise.initialize(model=model, optimizer=optimizer, config=config)


def through_trainer(model, optimizer):
    data = [{"x": x, "labels": y} for x, y in rows(4)]
    args = poise.TrainingArguments(max_steps=1)
    poise.Trainer(model, args, train_dataset=data, optimizers=(optimizer, None)).train()


@pytest.mark.parametrize("face", [through_wrap, through_initialize, through_trainer])
def test_a_refused_model_is_trained_as_it_was(face):
    model = network()
    model[0].requires_grad_(False)
    with pytest.raises(poise.Error, match="no parameter of the model is trainable"):
        face(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_settings_that_torchs_objects_have_already_are_refused():
    for config in ({"optimizer": {"lr": 0.5}}, {"schedule": {"type": "cosine"}}):
        model = network()
        with pytest.raises(poise.Error, match="says already"):
            poise.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    model = network()
    with pytest.raises(poise.Error, match="accumulation is 4"):
        poise.wrap(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            accumulation=4,
            config={"batch": {"accumulation": 2}},
        )


def test_a_scheduler_that_was_not_given_is_noticed():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    with pytest.raises(poise.Error, match="give scheduler="):
        poise.wrap(model, sgd, accumulation=2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(poise.Error, match="another optimizer"):
        poise.wrap(model, other, torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_is_refused_unless_it_does_nothing(fused, unscales):
    model, (x, y) = network(), rows(4)[:]
    before = [p.detach().clone() for p in model.parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    run, *_ = poise.wrap(model, sgd)
    for enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(F.cross_entropy(run(x), y)).backward()
        if unscales:
            scaler.unscale_(sgd)
        if enabled:
            with pytest.raises(poise.Error, match="a GradScaler steps the optimizer"):
                scaler.step(sgd)
            assert all(map(torch.equal, before, model.parameters()))
            sgd.zero_grad()
            del sgd.grad_scale, sgd.found_inf
        else:
            scaler.step(sgd)
            scaler.update()
    assert run.last_result.applied


@pytest.mark.parametrize("what", ["wrapped", "engine", "deepspeed"])
@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_what_has_an_engine_says_what_to_do(what, way):
    model = network()
    if what == "deepspeed":
        config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        thing, *_ = poise.initialize(model=model, config=config)
    else:
        run, *_ = poise.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        thing = run if what == "wrapped" else run.engine
    with pytest.raises(poise.Error, match=r"cannot be copied or pickled.*\.state_dict\(\) has"):
        way(thing)
    copied = copy.deepcopy(model)  # as the error says
    for p, q in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q) and p.data_ptr() != q.data_ptr()
