"""Parameters that are frozen and freed while a run goes on, beside transformers' Trainer and torch."""

import poise
import pytest
import rank_processes
import torch
import torch.nn.functional as F
import transformers
from hf_models import causal_rows, made
from poise import optimizers
from test_deepspeed import in_pieces
from test_hf_trainer import arguments, losses, without_strategy
from test_second_run import rates
from tiny_models import same_bits
from torch.utils.data import TensorDataset
from wrapped_loops import adamw, distance, network, plain, rows

pytestmark = pytest.mark.usefixtures("one_thread")


class Thaws(transformers.TrainerCallback):
    """Freezes and frees the blocks and the embedding before the updates it is told."""

    def __init__(self, plan):
        self.plan = plan

    def on_train_begin(self, args, state, control, model=None, **details):
        self.change(model, 0)

    def on_step_end(self, args, state, control, model=None, **details):
        self.change(model, state.global_step)

    def change(self, model, step):
        for name, trained in self.plan.get(step, {}).items():
            model.get_submodule(name).requires_grad_(trained)


BODY, WORDS = "transformer.h", "transformer.wte"
PLANS = {
    "the body first": {0: {BODY: False}, 3: {BODY: True}},
    "and again": {1: {BODY: False}, 3: {BODY: True, WORDS: False}, 5: {BODY: False, WORDS: True}},
    "for good": {2: {WORDS: False}},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1, "adam_epsilon": 1e-10}, {"optim": "sgd", "learning_rate": 0.1}],
)
@pytest.mark.parametrize("given", [False, True])
def test_frozen_and_freed_parameters_train_as_in_transformers(plan, options, given, tmp_path):
    rows = [{"input_ids": r["input_ids"], "labels": r["input_ids"].clone()} for r in causal_rows(8)]
    for row in rows:
        row["labels"][0] = -100
    seen, models = [], []
    for kind in (transformers.Trainer, poise.Trainer):
        args = without_strategy(
            tmp_path / kind.__module__,
            transformers.TrainingArguments,
            **{"num_train_epochs": 8, "report_to": "none", "save_strategy": "no"},
            **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            **options,
        )
        model = made("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if given else None
        trainer = kind(
            model,
            args,
            train_dataset=rows,
            callbacks=[Thaws(PLANS[plan])],
            optimizers=(optimizer, None),
        )
        trainer.train()
        seen.append(losses(trainer) + rates(trainer))
        models.append(model)
    assert seen[1] == pytest.approx(seen[0], rel=2e-4)
    # Of each parameter's way. A bias of keys has no gradient but its rounding, whose sign Adam follows.
    start = dict(made("gpt2").named_parameters())
    for (name, p), q in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        if name.endswith("c_attn.bias"):
            continue
        moved = (q - start[name]).norm()
        assert moved > 0 and (p - q).norm() <= 1e-3 * moved, (name, float((p - q).norm() / moved))


def test_what_is_frozen_keeps_its_bits_and_the_rest_does_not_notice(tmp_path):
    model, rows, kept = made("gpt2"), causal_rows(32), []

    class Keeps(Thaws):
        def on_step_end(self, args, state, control, model=None, **details):
            super().on_step_end(args, state, control, model, **details)
            kept.append(model.transformer.wte.weight.detach().clone())

    args = arguments(tmp_path, bf16=True, gradient_checkpointing=True)
    trainer = poise.Trainer(
        model, args, train_dataset=rows, callbacks=[Keeps({1: {WORDS: False}, 3: {WORDS: True}})]
    )
    trainer.train()
    equal = [torch.equal(a, b) for a, b in zip(kept, kept[1:], strict=False)]
    assert equal == [True, True, False]  # updates 2, 3 and 4


def test_a_plan_that_changes_nothing_changes_no_bit(tmp_path):
    models = []
    for plan in ({}, {1: {WORDS: True}}):
        models.append(made("gpt2"))
        trainer = poise.Trainer(
            models[-1], arguments(tmp_path), train_dataset=causal_rows(16), callbacks=[Thaws(plan)]
        )
        trainer.train()
    assert same_bits(*models)


def test_what_had_no_state_cannot_be_freed(tmp_path):
    model = made("gpt2")
    model.transformer.wte.requires_grad_(False)
    trainer = poise.Trainer(
        model,
        arguments(tmp_path),
        callbacks=[Thaws({1: {WORDS: True}})],
        train_dataset=causal_rows(16),
    )
    with pytest.raises(poise.Error, match="was frozen when the engine was made, and is to be"):
        trainer.train()


# Beside torch in float64, in a loop of one's own.

PLAN = {1: {"0": False}, 3: {"0": True, "2": False}, 5: {"2": True}}  # before these updates


def change(model, update, plan=None):
    for name, trained in (PLAN if plan is None else plan).get(update, {}).items():
        model.get_submodule(name).requires_grad_(trained)


def in_torch(model, optimizer, windows, plan=None, begin=0):
    for update, window in enumerate(windows, begin):
        change(model, update, plan)
        plain(model, optimizer, [window])


def in_poise(model, optimizer, windows, plan=None, begin=0, **more):
    run, *_ = poise.wrap(model, optimizer, accumulation=2, **more)
    for update, window in enumerate(windows, begin):
        change(model, update, plan)
        for x, y in in_pieces(TensorDataset(*window), 4):
            F.cross_entropy(run(x), y).backward()
            optimizer.step()
    return run


OPTIMIZERS = {
    "adamw": adamw,
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "lamb": lambda m: optimizers.Lamb(m.parameters(), lr=0.01, weight_decay=0.1),
    "lars": lambda m: optimizers.Lars(m.parameters(), lr=1.0, trust_coefficient=0.02),
    "lion": lambda m: optimizers.Lion(m.parameters(), lr=1e-3, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_leaves_out_what_is_frozen(kind):
    windows = in_pieces(rows(56), 8)
    reference, model = network(dtype=torch.float64), network()
    theirs, ours = OPTIMIZERS[kind](reference), OPTIMIZERS[kind](model)
    in_torch(reference, theirs, windows)
    in_poise(model, ours, windows)
    assert distance(model, reference) < 2e-6
    mine, torchs = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert mine.keys() == torchs.keys()
    if kind in ("adamw", "adam"):
        assert [float(mine[i]["step"]) for i in mine] == [float(torchs[i]["step"]) for i in mine]
        assert float(mine[0]["step"]) < 7


def test_a_state_of_parameters_that_began_late_is_taken_over():
    windows = in_pieces(rows(56), 8)
    late = {0: {"0": False}, 2: {"0": True}}
    reference = network(dtype=torch.float64)
    in_torch(reference, adamw(reference), windows, late)
    model = network()
    first = adamw(model)
    in_torch(model, first, windows[:3], late)
    in_poise(model, first, windows[3:], late, begin=3)
    assert distance(model, reference) < 2e-6


@pytest.mark.parametrize("when", [2, 4])
def test_a_saved_run_knows_what_was_left_out(when, tmp_path):
    windows = in_pieces(rows(56), 8)
    whole = network()
    in_poise(whole, adamw(whole), windows)
    begun, resumed = network(), network()
    in_poise(begun, adamw(begun), windows[:when]).save(tmp_path)
    optimizer = adamw(resumed)
    run, *_ = poise.wrap(resumed, optimizer, accumulation=2)
    run.load(tmp_path)
    for update in range(when):
        change(resumed, update)
    for update, window in enumerate(windows[when:], when):
        change(resumed, update)
        for x, y in in_pieces(TensorDataset(*window), 4):
            run.backward(F.cross_entropy(run(x), y))
            optimizer.step()
    assert same_bits(whole, resumed)


@pytest.mark.parametrize("place", ["host", "file", "parameters"])
def test_states_that_are_offloaded_change_no_bit(place, tmp_path):
    precision = {"dtype": "bf16", "parameters": "bf16"}
    offload = {
        "host": {"optimizer": "host"},
        "file": {"optimizer": "file", "directory": str(tmp_path), "block_bytes": 4096},
        "parameters": {"optimizer": "host", "parameters": "host"},
    }[place]
    models = []
    for more in ({}, {"offload": offload}):
        model = network()
        run = in_poise(
            model, adamw(model), in_pieces(rows(56), 8), config={"precision": precision, **more}
        )
        models.append(run.state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return rank_processes.run("deepspeed_on_ranks.py", "frozen", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("stage", range(4))
def test_ranks_train_the_same_at_every_stage(ranks, stage):
    assert all(rank["distances"][stage] < 2e-6 for rank in ranks)


def test_ranks_that_freeze_other_parameters_are_told(ranks):
    assert all("has frozen other parameters than rank" in rank["mismatch"] for rank in ranks)


def test_an_optimizer_whose_moments_cannot_be_left_out_says_so():
    model = network()
    engine = poise.Engine(model, {"optimizer": {"type": "adafactor"}})
    model[0].requires_grad_(False)
    x, y = rows(8)[:]
    with pytest.raises(poise.Error, match=r"'0.weight' was frozen after .*adafactor keeps moments"):
        engine.step([(x, y)], lambda batch: F.cross_entropy(model(batch[0]), batch[1]))


@pytest.mark.parametrize(("before", "meant"), [(True, "frozen"), (False, "freed")])
@pytest.mark.parametrize("when", ["backward", "step", "begin_update"])
def test_a_change_within_a_window_is_an_error_and_drops_it(before, meant, when):
    model, plain_one = network(), network()
    engine = poise.Engine(model, {"batch": {"accumulation": 2}, "optimizer": {"type": "sgd"}})
    [(x, y)] = in_pieces(rows(8), 8)

    def backward():
        engine.backward(F.cross_entropy(engine(x), y))

    model[0].requires_grad_(before)
    backward()
    if when != "backward":
        backward()
    model[0].requires_grad_(not before)
    with pytest.raises(poise.Error, match=f"'0.weight' was {meant} .* within a window, which has"):
        backward() if when == "backward" else getattr(engine, when)()
    assert engine.micro_batches == 0 and same_bits(model, plain_one)
    for _ in range(2):  # the window that comes trains by what is said now
        backward()
    norm = engine.step().grad_norm
    plain_one[0].requires_grad_(not before)
    F.cross_entropy(plain_one(x), y).backward()
    grads = [p.grad for p in plain_one.parameters() if p.grad is not None]
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-5)


def test_gradients_of_what_is_frozen_do_not_count():
    model, plain_one = network(), network()
    engine = poise.Engine(model, {"optimizer": {"type": "sgd", "max_grad_norm": 0.0}})
    [(x, y)] = in_pieces(rows(8), 8)

    def loss(model):
        look = model(x)  # before the window, though nobody said no_grad()
        network_of[0].requires_grad_(False)
        return F.cross_entropy(model(x), y) + look.sum()

    network_of = model
    engine.backward(loss(engine))
    norm = engine.step().grad_norm
    network_of = plain_one
    loss(plain_one).backward()
    grads = [p.grad for p in plain_one.parameters() if p.requires_grad]
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-5)
    assert torch.equal(model[0].weight, network()[0].weight)


def test_a_callback_that_changes_it_within_a_window_is_told(tmp_path):
    class Freezes(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, **details):
            model.transformer.wte.requires_grad_(False)

    args = arguments(tmp_path, gradient_accumulation_steps=2)
    trainer = poise.Trainer(
        made("gpt2"), args, train_dataset=causal_rows(16), callbacks=[Freezes()]
    )
    with pytest.raises(poise.Error, match="was frozen .* within a window"):
        trainer.train()
