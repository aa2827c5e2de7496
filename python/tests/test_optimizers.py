"""Optimizers that torch does not have: the engine's kernels and poise.optimizers, each against the other
in float64, and under the names that scripts and DeepSpeed's files have for them."""

import copy

import poise
import pytest
import torch
from poise import optimizers
from poise.config import settings_of
from test_deepspeed import WithLoss, config, in_pieces, run
from torch.utils.data import DataLoader
from wrapped_loops import network, plain, rows, wrapped

pytestmark = pytest.mark.usefixtures("one_thread")


def groups_of(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 3e-3},
    ]


MAKERS = {
    "lamb": lambda model: optimizers.Lamb(groups_of(model), lr=1e-2, betas=(0.8, 0.95)),
    "lars": lambda model: optimizers.Lars(groups_of(model), lr=1.0, trust_coefficient=0.02),
    "lion": lambda model: optimizers.Lion(groups_of(model), lr=1e-3, betas=(0.8, 0.95)),
}


def windows(dataset, size):
    return [dataset[i : i + size] for i in range(0, len(dataset), size)]


def furthest(model, reference):
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((a - b.double()).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", MAKERS)
def test_a_wrapped_loop_is_the_class_in_float64(name):
    data = rows(48)
    reference = network(dtype=torch.float64)
    start = copy.deepcopy(reference)
    plain(reference, MAKERS[name](reference), windows(data, 8))
    model = network()
    wrapped(model, MAKERS[name](model), None, DataLoader(data, 4), accumulation=2)
    assert furthest(model, reference) < 2e-6
    assert furthest(start, reference) > 3e-3  # six updates of it


@pytest.mark.parametrize("name", MAKERS)
def test_its_state_goes_over_and_comes_back(name):
    data = rows(32)
    whole = network()
    wrapped(whole, MAKERS[name](whole), None, DataLoader(data, 8), accumulation=1)

    # Two updates in plain torch, then two by an engine.
    model = network()
    optimizer = MAKERS[name](model)
    plain(model, optimizer, windows(data, 8)[:2])
    mine = poise.wrap(model, optimizer)
    for x, y in windows(data, 8)[2:]:
        mine.model.backward(torch.nn.functional.cross_entropy(mine.model(x), y))
        mine.optimizer.step()
    assert furthest(model, whole) < 2e-6
    state = mine.optimizer.state_dict()["state"]
    assert all(bool((v != 0).any()) for v in state[0].values() if v.dim() > 0)

    # And back to plain torch: one more update of both.
    copied = network()
    copied.load_state_dict(model.state_dict())
    again = MAKERS[name](copied)
    again.load_state_dict(mine.optimizer.state_dict())
    x, y = data[:8]
    plain(copied, again, [(x, y)])
    mine.model.backward(torch.nn.functional.cross_entropy(mine.model(x), y))
    mine.optimizer.step()
    assert furthest(model, copied) < 2e-6


@pytest.mark.parametrize(
    "name, type_",
    [
        ("lion_32bit", "lion"),
        ("paged_adamw_32bit", "adamw"),
        ("adafactor", "adafactor"),
        ("lamb", "lamb"),
        ("lars", "lars"),
    ],
)
def test_names_of_transformers(name, type_, tmp_path):
    arguments = poise.TrainingArguments(str(tmp_path), optim=name, adam_beta2=0.95)
    section = arguments.to_config(10)["optimizer"]
    assert (section["type"], section["beta2"]) == (type_, 0.95)


@pytest.mark.parametrize(
    "name", ["adafactor", "adamw_8bit", "lamb", "lars", "lion_32bit", "lion_8bit"]
)
def test_a_trainer_learns_by_it_and_goes_on_to_the_bit(name, tmp_path):
    data = [{"x": x, "y": y} for x, y in rows(64)]

    class Model(WithLoss):
        def forward(self, x, y):
            return {"loss": super().forward(x, y)}

    def trained(folder, updates, **more):
        torch.manual_seed(0)
        rate = 1.0 if name == "lars" else 1e-2
        args = poise.TrainingArguments(
            str(tmp_path / folder),
            optim=name,
            learning_rate=rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=8,
            max_steps=updates,
            save_steps=4,
            logging_steps=1,
            label_names=["y"],
            **more,
        )
        trainer = poise.Trainer(model=Model(), args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=more.get("resume_from_checkpoint"))
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return losses, [p.detach().clone() for p in trainer.model.parameters()]

    losses, whole = trained("whole", 24)
    assert sum(losses[16:]) < 0.95 * sum(losses[:8])
    trained("part", 8)
    _, resumed = trained("part", 24, resume_from_checkpoint=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("name", ["Lion", "FusedLion"])
def test_names_of_deepspeed(name):
    params = {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}
    given = config(optimizer={"type": name, "params": params})
    engine, optimizer, _, _ = poise.initialize(model=WithLoss(), config=given)
    assert type(optimizer).__name__ == "Lion"
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    assert engine is not None


@pytest.mark.parametrize(
    "given, moments",
    [
        ({}, "fp32"),
        ({"optim": "adamw_8bit"}, "8bit"),
        ({"optim": "paged_adamw_8bit"}, "8bit"),
        ({"optim": "adamw_bnb_8bit", "optimizer_moments": "bf16"}, "bf16"),
        ({"optimizer_moments": "bf16"}, "bf16"),
    ],
)
def test_moments_of_a_trainer(given, moments, tmp_path):
    section = poise.TrainingArguments(str(tmp_path), **given).to_config(10)["optimizer"]
    assert (section["type"], section["moments"]) == ("adamw", moments)


@pytest.mark.parametrize("name", ["lion_8bit", "paged_lion_8bit"])
def test_moments_of_lion(name, tmp_path):
    section = poise.TrainingArguments(str(tmp_path), optim=name).to_config(10)["optimizer"]
    assert (section["type"], section["moments"]) == ("lion", "8bit")


@pytest.mark.parametrize("scaled", [False, True])
def test_adafactor_is_transformers_own(scaled):
    transformers = pytest.importorskip("transformers")
    data = rows(48)
    reference, model = network(dtype=torch.float64), network()
    theirs = transformers.Adafactor(
        groups_of_one_rate(reference), lr=1e-2, scale_parameter=scaled, relative_step=False
    )
    plain(reference, theirs, windows(data, 8))
    settings = {
        "batch": {"accumulation": 2},
        "optimizer": {
            "type": "adafactor",
            "lr": 1e-2,
            "weight_decay": 0.1,
            "scale_parameter": scaled,
            "max_grad_norm": 0,
        },
    }
    engine = poise.Engine(model, settings)
    for x, y in windows(data, 8):
        pieces = [(x[:4], y[:4]), (x[4:], y[4:])]
        engine.step(
            pieces, lambda piece: torch.nn.functional.cross_entropy(model(piece[0]), piece[1])
        )
    assert furthest(model, reference) < 2e-6


def test_adafactor_of_transformers_is_taken_over():
    transformers = pytest.importorskip("transformers")
    data = rows(48)

    def make(model, **more):
        options = {"lr": 1e-2, "scale_parameter": False, "relative_step": False, **more}
        return transformers.Adafactor(groups_of_one_rate(model), **options)

    reference, model = network(dtype=torch.float64), network()
    plain(reference, make(reference, clip_threshold=0.5), windows(data, 8))
    wrapped(model, make(model, clip_threshold=0.5), None, DataLoader(data, 4), accumulation=2)
    assert furthest(model, reference) < 2e-6
    for option in ({"lr": None, "relative_step": True}, {"beta1": 0.9}):
        with pytest.raises(poise.Error, match="without momentum and relative steps"):
            poise.wrap(network(), make(network(), **option))
    used = network()
    optimizer = make(used)
    plain(used, optimizer, windows(data, 8)[:1])
    with pytest.raises(poise.Error, match="begin with a fresh one"):
        poise.wrap(used, optimizer)


def groups_of_one_rate(model):
    return [{k: v for k, v in group.items() if k != "lr"} for group in groups_of(model)]


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_a_wrapped_loop_trains_with_moments_in_fewer_bits(moments):
    data = rows(48)

    def trained(settings):
        model = network()
        adam = torch.optim.AdamW(groups_of(model), lr=1e-2)
        wrapped(model, adam, None, DataLoader(data, 8), accumulation=1, epochs=3, config=settings)
        return model

    def loss(model):
        x, y = data[:]
        return float(torch.nn.functional.cross_entropy(model(x), y).detach())

    exact, rounded = trained(None), trained({"optimizer": {"moments": moments}})
    assert furthest(exact, rounded) > 0
    assert loss(rounded) == pytest.approx(loss(exact), rel=0.05)
    assert loss(exact) < 0.8 * loss(network())


def test_moments_without_the_parameters_shape_cannot_be_taken_out():
    model = network()
    adam = torch.optim.AdamW(model.parameters())
    mine = poise.wrap(model, adam, config={"optimizer": {"moments": "8bit"}})
    x, y = rows(8)[:]
    mine.model.backward(torch.nn.functional.cross_entropy(mine.model(x), y))
    mine.optimizer.step()
    with pytest.raises(poise.Error, match="adamw_8bit keeps its moments in another form"):
        mine.optimizer.state_dict()


def test_bf16_states_of_deepspeed():
    bf16 = {"enabled": True, "bf16_optimizer_states": True}
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, _, _, _ = poise.initialize(model=WithLoss(), config=config(optimizer=adam, bf16=bf16))
    assert settings_of(engine.engine.config)["optimizer"]["moments"] == "bf16"


def test_lamb_of_deepspeed_has_its_limits():
    given = config(optimizer={"type": "Lamb", "params": {"lr": 1e-2, "max_coeff": 0.3}})
    model, reference = WithLoss(), network(dtype=torch.float64)
    engine, optimizer, _, _ = poise.initialize(model=model, config=given)
    group = optimizer.param_groups[0]
    assert (type(optimizer).__name__, group["min_coeff"], group["max_coeff"]) == ("Lamb", 0.01, 0.3)
    run(engine, in_pieces(rows(32), 2))
    limited = optimizers.Lamb(reference.parameters(), 1e-2, eps=1e-8, min_coeff=0.01, max_coeff=0.3)
    plain(reference, limited, in_pieces(rows(32), 8))
    assert furthest(model.body, reference) < 2e-6


def test_betas_that_are_none_are_refused():
    with pytest.raises(poise.Error, match="two numbers in"):
        optimizers.Lion(network().parameters(), betas=(0.9, 1.0))
