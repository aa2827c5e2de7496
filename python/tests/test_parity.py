"""The balance never changes the training: poise against float64, plain torch and itself."""

import copy
import math

import plain_loop
import poise
import pytest
import torch
from plain_loop import Recipe, settings
from tiny_models import batch, counted, joined, ragged_windows, same_bits, split, tiny

RECIPES = {
    "fp32": Recipe(),
    "bf16 autocast": Recipe(autocast=torch.bfloat16),
    "bf16 parameters": Recipe(parameters=torch.bfloat16, autocast=torch.bfloat16),
    "bf16 parameters, no autocast": Recipe(parameters=torch.bfloat16),
    "fp16 autocast": Recipe(autocast=torch.float16, loss_scale=1024.0),
    "fp16 parameters": Recipe(parameters=torch.float16, autocast=torch.float16, loss_scale=1024.0),
}


def losses_and_masters(model, windows, config):
    """Trains a copy of `model` with poise."""
    model = copy.deepcopy(model)
    engine = poise.Engine(model, config)
    losses = []
    for window in windows:
        result = engine.step(window, lambda piece: (model(**piece), counted(piece)))
        assert result.status == "applied"
        losses.append(result.loss)
    return losses, {
        name: engine.master(name).detach().double() for name, _ in model.named_parameters()
    }


SEEDS = range(4)


def whole(windows):
    return [[joined(window)] for window in windows]


WINDOWS = {"split": ragged_windows(6), "whole": whole(ragged_windows(6))}


@pytest.fixture(scope="module")
def exact():
    """float64 runs of the windows from each seed, as they are split and as one batch each."""
    recipe = Recipe(dtype=torch.float64)
    return {
        (form, seed): plain_loop.train(tiny(seed=seed).double(), windows, recipe)
        for form, windows in WINDOWS.items()
        for seed in SEEDS
    }


def root_mean_square(errors):
    # Over seeds and updates: the error of a single number may be small by chance.
    return math.sqrt(sum(e * e for e in errors) / len(errors))


def distances(losses, exact_losses):
    return [a - b for a, b in zip(losses, exact_losses, strict=True)]


def test_the_reference_does_not_depend_on_the_split(exact):
    assert plain_loop.error(exact["split", 0][0], exact["whole", 0][0]) < 1e-12


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("policy", ["none", "every_n"])
@pytest.mark.parametrize("form", WINDOWS)
def test_error_is_at_most_twice_that_of_plain_torch(exact, name, policy, form):
    recipe, windows = RECIPES[name], WINDOWS[form]
    config = settings(recipe, checkpointing={"policy": policy})
    ours, theirs, our_losses, their_losses = [], [], [], []
    for seed in SEEDS:
        values, exact_losses = exact[form, seed]
        plain, losses = plain_loop.train(tiny(seed=seed), windows, recipe)
        theirs.append(plain_loop.error(plain, values))
        their_losses += distances(losses, exact_losses)
        losses, masters = losses_and_masters(tiny(seed=seed), windows, config)
        ours.append(plain_loop.error(masters, values))
        our_losses += distances(losses, exact_losses)
    assert root_mean_square(ours) <= 2 * root_mean_square(theirs)
    assert root_mean_square(our_losses) <= 2 * root_mean_square(their_losses)


@pytest.mark.parametrize("name", RECIPES)
def test_gradient_of_a_window_is_at_most_twice_as_wrong_as_that_of_plain_torch(name):
    recipe, ours, theirs = RECIPES[name], [], []
    for seed in SEEDS:
        window, model = split(batch(8, 12, seed=500 + seed, masked=0.4), 2), tiny(seed=seed)
        reference, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
        exact, _ = plain_loop.gradients(reference, window, Recipe(dtype=torch.float64))
        made, _ = plain_loop.gradients(plain.to(recipe.parameters or torch.float32), window, recipe)
        engine = poise.Engine(model, settings(recipe))
        for piece in window:
            engine.backward(engine(**piece), tokens=counted(piece))
        engine.begin_update()
        for p, exact_gradient, their_gradient in zip(model.parameters(), exact, made, strict=True):
            ours.append((engine.gradient(p).double() - exact_gradient).norm().item())
            theirs.append((their_gradient.double() - exact_gradient).norm().item())
    assert root_mean_square(ours) <= 2 * root_mean_square(theirs)


def test_accumulated_and_big_batch_agree_to_rounding(exact):
    _, accumulated = losses_and_masters(tiny(), WINDOWS["split"], settings(Recipe()))
    _, big = losses_and_masters(tiny(), WINDOWS["whole"], settings(Recipe()))
    plain, _ = plain_loop.train(tiny(), WINDOWS["split"], Recipe())
    assert plain_loop.error(accumulated, big) <= 4 * plain_loop.error(plain, exact["split", 0][0])


@pytest.mark.parametrize(
    "name", ["fp32", "bf16 autocast", "bf16 parameters", "fp16 autocast", "fp16 parameters"]
)
def test_three_calls_are_the_window_to_the_bit(name):
    windows, config = ragged_windows(), settings(RECIPES[name])
    one, three = tiny(dropout=0.2), tiny(dropout=0.2)
    window_engine, call_engine = poise.Engine(one, config), poise.Engine(three, config)
    for window in windows:
        torch.manual_seed(7)
        expected = window_engine.step(window, lambda piece: (one(**piece), counted(piece)))
        torch.manual_seed(7)
        for piece in window:
            assert not call_engine.is_boundary()
            call_engine.backward(call_engine(**piece), tokens=counted(piece))
        result = call_engine.step(last=len(window) < 4)
        assert (result.loss, result.grad_norm, result.status) == (
            expected.loss,
            expected.grad_norm,
            expected.status,
        )
    assert same_bits(one, three)


@pytest.mark.parametrize("policy", ["every_n", "sqrt", "first_m", "selective"])
@pytest.mark.parametrize("name", ["fp32", "bf16 autocast", "fp16 parameters"])
def test_recompute_changes_no_bit_with_dropout(name, policy):
    def run(chosen):
        model = tiny(dropout=0.3)
        torch.manual_seed(5)
        return losses_and_masters(
            model, ragged_windows(), settings(RECIPES[name], checkpointing={"policy": chosen})
        )

    (kept_losses, kept), (losses, values) = run("none"), run(policy)
    assert losses == kept_losses
    assert all(torch.equal(values[n], kept[n]) for n in kept)


@pytest.mark.parametrize("name", ["fp32", "bf16 parameters", "fp16 autocast"])
def test_run_to_run_to_the_bit(name):
    def run():
        torch.manual_seed(5)
        return losses_and_masters(tiny(dropout=0.3), ragged_windows(), settings(RECIPES[name]))

    (first_losses, first), (losses, values) = run(), run()
    assert losses == first_losses
    assert all(torch.equal(values[n], first[n]) for n in first)


def per_token(model, piece):
    logits = model.logits(piece["input_ids"])[:, :-1]
    labels = piece["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )


FORMS = {
    "tuple": lambda model, piece: (model(**piece), counted(piece)),
    "tuple with a number": lambda model, piece: (model(**piece), counted(piece).item()),
    "dictionary": lambda model, piece: {"loss": model(**piece), "n": counted(piece)},
    "num_tokens": lambda model, piece: {
        "loss": model(**piece),
        "num_tokens": counted(piece),
        "logits": None,
    },
    "mean": lambda model, piece: poise.Loss(model(**piece), counted(piece)),
    "sum": lambda model, piece: poise.Loss(
        per_token(model, piece).sum(), counted(piece), kind="sum"
    ),
    "per token": lambda model, piece: poise.Loss(
        per_token(model, piece), counted(piece), kind="per_token"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_loss_agree(exact, form):
    model = tiny()
    engine = poise.Engine(model, settings(Recipe()))
    windows = WINDOWS["split"]
    losses = [engine.step(w, lambda piece: FORMS[form](model, piece)).loss for w in windows]
    ours = {name: engine.master(name).detach().double() for name, _ in model.named_parameters()}
    theirs, _ = plain_loop.train(tiny(), windows, Recipe())
    reference, exact_losses = exact["split", 0]
    assert losses == pytest.approx(exact_losses, rel=1e-6)
    assert plain_loop.error(ours, reference) <= 2 * plain_loop.error(theirs, reference)


def test_mean_without_a_count_weighs_micro_batches_equally():
    windows = [split(batch(8, 12, seed=1), 2)]  # equal counts: the same as by tokens
    counted_model, plain_model = tiny(), tiny()
    expected = poise.Engine(counted_model, settings(Recipe())).step(
        windows[0], lambda piece: (counted_model(**piece), counted(piece))
    )
    result = poise.Engine(plain_model, settings(Recipe())).step(
        windows[0], lambda piece: plain_model(**piece)
    )
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_terms_with_counts_of_their_own():
    """Main loss by tokens plus 0.5 x a term by samples, whatever the split."""

    def loss(model, piece):
        hidden = (
            model.embedding(piece["input_ids"]).square().mean(dim=(1, 2))
        )  # one value per sample
        term = poise.Term(hidden.sum(), len(hidden), kind="sum", weight=0.5)
        return poise.Loss(model(**piece), counted(piece), terms=[term])

    whole = batch(6, 12, seed=3, masked=0.4)
    total, samples = counted(whole).item(), len(whole["labels"])
    reference = tiny().double()
    exact = (
        reference(**whole)
        + 0.5 * reference.embedding(whole["input_ids"]).square().mean(dim=(1, 2)).mean()
    )
    gradients = torch.autograd.grad(exact, list(reference.parameters()))
    for rows in (6, 4, 2):
        model = tiny()
        engine = poise.Engine(model, settings(Recipe(max_grad_norm=0)))
        result = engine.step(
            split(whole, rows),
            lambda piece, model=model: loss(model, piece),
            counts=[total, samples],
        )
        assert result.grad_norm == pytest.approx(
            float(sum((g**2).sum() for g in gradients).sqrt()), rel=1e-5
        )


def test_terms_without_counts_are_refused():
    model = tiny()
    engine = poise.Engine(model, settings(Recipe()))
    whole = batch(4, 12, seed=3)

    def loss(piece):
        return poise.Loss(
            model(**piece), counted(piece), terms=[(model.head.bias.square().sum(), 1)]
        )

    with pytest.raises(poise.Error, match="count"):
        engine.step(split(whole, 2), loss)


class OddParameters(torch.nn.Module):
    """Tied, frozen, unused, 0-dim, empty and transposed parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(5, 5, bias=False)
        self.second = torch.nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.randn(3, 3))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 5))
        self.transposed = torch.nn.Parameter(torch.randn(4, 5).t())

    def forward(self, x):
        hidden = (
            self.second(torch.tanh(self.first(x))) * self.scale + self.frozen + self.empty.sum()
        )
        return (hidden @ self.transposed).square().mean()


def test_tied_frozen_unused_scalar_empty_and_transposed_parameters():
    config = settings(Recipe(weight_decay=0))
    model, plain = OddParameters(), OddParameters()
    reference = OddParameters().double()
    before = plain.unused.detach().clone()
    engine = poise.Engine(model, config)
    assert model.second.weight is model.first.weight
    assert model.transposed.shape == (5, 4)
    inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0) for m in (plain, reference)
    ]
    for i in range(0, 12, 4):
        engine.step(inputs[i : i + 4], lambda x: (model(x), 4))
        for m, optimizer in zip((plain, reference), optimizers, strict=False):
            optimizer.zero_grad()
            for x in inputs[i : i + 4]:
                (m(x.to(m.scale.dtype)) / 4).backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
    ours, theirs, exact = (
        {n: p.detach().double() for n, p in m.named_parameters()} for m in (model, plain, reference)
    )
    assert plain_loop.error(ours, exact) <= 2 * plain_loop.error(theirs, exact)
    assert torch.equal(model.unused, before)
    assert torch.equal(model.frozen, plain.frozen)


class Spectrum(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, x):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return torch.fft.ifft(torch.fft.fft(x) * weight).abs().square().mean()


def test_complex_parameters_are_trained_as_pairs_of_real_ones():
    # pytorch 158753, 71613: imaginary parts of gradients were lost.
    torch.manual_seed(2)
    weight, inputs = torch.randn(5, dtype=torch.cfloat), torch.randn(12, 4, 5)
    with pytest.raises(poise.Error, match="'weight' is trainable and of type .*view_as_real"):
        poise.Engine(Spectrum(weight))
    frozen = torch.nn.ModuleList([Spectrum(weight).requires_grad_(False), torch.nn.Linear(2, 2)])
    poise.Engine(frozen)
    assert torch.equal(frozen[0].weight, weight)

    model = Spectrum(torch.view_as_real(weight))
    plain = Spectrum(weight.to(torch.cdouble))
    engine = poise.Engine(model, settings(Recipe(weight_decay=0, max_grad_norm=0, eps=1e-3)))
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0, eps=1e-3)
    for window in inputs.split(4):
        engine.step(list(window), lambda x: (model(x), 4))
        adam.zero_grad()
        plain(window.flatten(0, 1).double()).backward()
        adam.step()
    trained = torch.view_as_complex(model.weight.detach())
    assert torch.allclose(trained.to(torch.cdouble), plain.weight, rtol=0, atol=1e-6)
    assert (trained.imag - weight.imag).abs().min() > 1e-3


def test_fp16_scale_grows_and_backs_off_at_the_exact_update():
    """By the rule of torch.amp.GradScaler: doubled after 3 clean updates, halved on overflow."""
    config = settings(Recipe(autocast=torch.float16, loss_scale=256.0, max_grad_norm=0))
    config["precision"]["loss_scale_growth_interval"] = 3
    overflows = {4, 5, 10}
    model = tiny()
    engine = poise.Engine(model, config)
    scale, clean, applied = 256.0, 0, 0
    for update in range(14):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        factor = (
            1e6 if update in overflows else 1.0
        )  # the loss stays finite, its fp16 gradients do not
        window = split(batch(4, 12, seed=update), 2)
        result = engine.step(
            window, lambda piece, factor=factor: (model(**piece) * factor, counted(piece))
        )
        assert result.loss_scale == scale
        if update in overflows:
            assert result.status == "overflow"
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            scale, clean = scale * 0.5, 0
        else:
            assert result.status == "applied"
            applied, clean = applied + 1, clean + 1
            if clean == 3:
                scale, clean = scale * 2, 0
        assert (engine.loss_scale, engine.updates) == (scale, applied)
    assert engine.skipped_updates == len(overflows)
