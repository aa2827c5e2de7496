"""poise.checkpointing on torch modules: the same bits, the model restored, torch's own checkpoint beside."""

import copy
import pickle

import poise
import pytest
import torch
from poise import checkpointing
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width=8, norm="layer"):
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm == "layer" else nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.25)
        self.runs = 0

    def forward(self, x, scale=None, extra=None):
        self.runs += 1
        y = self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        if scale is not None:
            y = y * scale["by"][0]
        return x + y if extra is None else {"x": x + y, "extra": [extra * 2]}


class Net(nn.Module):
    def __init__(self, blocks=4, norm="layer"):
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(norm=norm) for _ in range(blocks))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(**kwargs):
    torch.manual_seed(0)
    return Net(**kwargs), torch.randn(6, 8)


def run(model, x, call=None):
    """Loss and every gradient from one random state."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = (call or model)(x).float().pow(2).sum()
    loss.backward()
    return [loss.detach(), torch.rand(3)] + [
        p.grad.clone() for p in model.parameters() if p.requires_grad
    ]


def assert_same_bits(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=False):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"policy": "every_n", "n": 2},
        {"policy": "sqrt"},
        {"policy": "first_m", "n": 3},
        {"policy": "list", "units": "blocks.[13]"},
        {"policy": "selective"},
        {"units": "Block"},
        {"units": Block},
        {"units": [nn.LayerNorm, "blocks.0.up"]},
        {"units": ["Block", nn.Linear]},  # regions inside regions
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_same_bits_with_dropout(how, autocast):
    model, x = make()

    def call(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x)

    expected = run(model, x, call)
    handle = checkpointing.apply(model, **how)
    assert handle.units
    assert_same_bits(run(model, x, call), expected)
    handle.remove()
    assert_same_bits(run(model, x, call), expected)


def test_runs_as_often_as_the_policy_says():
    model, x = make()
    checkpointing.apply(model, "every_n", n=2)
    run(model, x)
    assert [block.runs for block in model.blocks] == [1, 2, 1, 2]
    with torch.no_grad():
        model(x)
    assert [block.runs for block in model.blocks] == [2, 3, 2, 3]


def test_remove_restores_the_model():
    model, x = make()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    handle = checkpointing.apply(model)
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    run(twin, x)
    assert [b.runs for b in twin.blocks] == [2] * 4 and [b.runs for b in model.blocks] == [0] * 4
    handle.remove()
    handle.remove()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    pickle.loads(pickle.dumps(model))


def test_forward_of_an_instance_is_called_and_comes_back():
    model, x = make()
    own = lambda x: Block.forward(model.blocks[0], x) * 3  # noqa: E731
    model.blocks[0].forward = own
    expected = run(model, x)
    handle = checkpointing.apply(model)
    assert_same_bits(run(model, x), expected)
    handle.remove()
    assert model.blocks[0].__dict__["forward"] is own


def test_refusals():
    model, _ = make()
    with pytest.raises(poise.Error, match="no module has the class or name Blok"):
        checkpointing.apply(model, units="Blok")
    with pytest.raises(poise.Error, match="unknown policy 'all'"):
        checkpointing.apply(model, "all")
    with pytest.raises(poise.Error, match="no ModuleList or Sequential"):
        checkpointing.apply(nn.Linear(2, 2))
    checkpointing.apply(model)
    with pytest.raises(poise.Error, match="recomputed already: blocks.0"):
        checkpointing.apply(model)


@pytest.mark.parametrize("selective", [False, True])
def test_batch_norm_statistics_move_once(selective):
    model, x = make(norm="batch")
    twin = copy.deepcopy(model)
    expected = run(twin, x)
    checkpointing.apply(model, "selective" if selective else "every_n")
    assert_same_bits(run(model, x), expected)
    for (name, a), (_, b) in zip(model.named_buffers(), twin.named_buffers(), strict=False):
        assert torch.equal(a, b), name


def test_keywords_nested_inputs_and_outputs_and_a_module_called_twice():
    model, x = make()
    block = model.blocks[0]

    def call(x):
        scale = {"by": [x.detach().abs().sum().reshape(1).requires_grad_(True)]}
        out = block(model.inp(x), scale=scale, extra=x)
        return block(out["x"], scale=scale) + out["extra"][0]

    def gradients():
        torch.manual_seed(1)
        return torch.autograd.grad(call(x).sum(), [*model.inp.parameters(), *block.parameters()])

    expected = gradients()
    checkpointing.apply(model)
    assert_same_bits(gradients(), expected)
    assert block.runs == 2 + 4


def test_frozen_inputs_and_adapters():
    model, x = make()
    model.inp.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    expected = run(model, x)
    checkpointing.apply(model)
    assert_same_bits(run(model, x), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["around", "inside"])
def test_beside_torch_checkpoint(reentrant, place):
    model, x = make()
    pairs = [nn.Sequential(model.blocks[0], model.blocks[1]), nn.Sequential(*model.blocks[2:])]

    def forward(outer, inner):
        def through(x):
            x = model.inp(x)
            for pair in pairs:
                x = outer(lambda y, pair=pair: inner(pair[1], inner(pair[0], y)), x)
            return model.head(x)

        return through

    def plain(fn, x):
        return fn(x)

    def torchs(fn, x):
        return checkpoint(fn, x, use_reentrant=reentrant)

    expected = run(model, x, forward(plain, plain))
    mix = (
        (torchs, checkpointing.recompute)
        if place == "around"
        else (checkpointing.recompute, torchs)
    )
    assert_same_bits(run(model, x, forward(*mix)), expected)


def test_nested_two_by_two_keeps_only_the_outer_inputs():
    model, x = make()
    recompute = checkpointing.recompute
    expected = run(model, x)
    kept = []

    def pair(first, second):
        def forward(x):
            y = recompute(first, x)
            if not checkpointing.recomputing():
                kept.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
            return recompute(second, y)

        return forward

    def call(x):
        b = model.blocks
        x = recompute(pair(b[2], b[3]), recompute(pair(b[0], b[1]), model.inp(x)))
        assert all(ref.expired() for ref in kept) and len(kept) == 2
        return model.head(x)

    assert_same_bits(run(model, x, call), expected)


def test_early_stop_and_exceptions_that_keep_their_type():
    model, x = make()
    reached = []

    class Custom(Exception):
        pass

    def fn(x):
        y = model.blocks[0](x)
        try:
            y = y.exp()
        except Exception:  # must not see how the second run ends
            reached.append("handler")
        reached.append(checkpointing.recomputing())
        return y

    checkpointing.recompute(fn, x.requires_grad_(True)).sum().backward()
    assert reached == [False]

    def broken(x):
        y = x.exp()
        if checkpointing.recomputing():
            raise Custom("second")
        return y.exp()

    loss = checkpointing.recompute(broken, x).sum()
    for _ in range(2):
        with pytest.raises(Custom, match="second"):
            loss.backward()
    with pytest.raises(ZeroDivisionError):
        checkpointing.recompute(lambda x: x.exp() / (1 // 0), x)
    assert_same_bits(run(model, x.detach()), run(model, x.detach()))


def test_mismatch_is_named():
    x = torch.randn(4, requires_grad=True)
    half = lambda x: x[:2].exp() if checkpointing.recomputing() else x.exp()  # noqa: E731
    with pytest.raises(poise.Error, match=r"was Float \[4\] on cpu, is Float \[2\]"):
        checkpointing.recompute(half, x).sum().backward()


def test_retained_graph_and_two_forwards_then_two_backwards():
    model, x = make()
    checkpointing.apply(model)
    torch.manual_seed(1)
    first, second = model(x).sum(), model(x).sum()
    params = list(model.parameters())
    a = torch.autograd.grad(second, params, retain_graph=True)
    b = torch.autograd.grad(second, params)
    assert_same_bits(a, b)
    c = torch.autograd.grad(first, params)
    torch.manual_seed(1)
    assert_same_bits(c, torch.autograd.grad(model(x).sum(), params))


class Stack(nn.Module):
    """Equal blocks of which each saves its input and two tensors four times as wide."""

    WIDTH = 8

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(self.WIDTH, 4 * self.WIDTH, bias=False),
                nn.GELU(),
                nn.Linear(4 * self.WIDTH, self.WIDTH, bias=False),
            )
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_the_peak_is_inputs_and_one_block(blocks):
    rows = 512
    narrow, wide = 4 * rows * Stack.WIDTH, 16 * rows * Stack.WIDTH
    weight = 16 * Stack.WIDTH**2
    # Of the last block's two, where one before it is recomputed: its input has gone by then, and the
    # gradient of that input has come.
    gradients = 2 * weight if blocks > 1 else 0

    def peaks(apply):
        model, gradient = Stack(blocks), torch.randn(rows, Stack.WIDTH)
        if apply:
            checkpointing.apply(model, units="blocks.?")
        with poise.memory.Ledger() as ledger:
            y = model(torch.randn(rows, Stack.WIDTH))
            held = ledger.snapshot().current_bytes - narrow  # of which y is nobody's to recompute
            ledger.reset_peak()
            y.backward(gradient)
            return held, ledger.snapshot().peak_bytes - narrow

    assert peaks(apply=False) == (
        blocks * (narrow + 2 * wide),
        blocks * (narrow + 2 * wide) + wide + weight,
    )
    assert peaks(apply=True) == (
        blocks * narrow,
        blocks * narrow + 3 * wide + weight + gradients,
    )


@pytest.mark.parametrize("policy", [{"policy": "never"}, {"policy": "list", "units": ["nobody"]}])
def test_a_policy_that_is_refused_leaves_an_engine_with_the_one_before(policy):
    model, x = make()
    engine = poise.Engine(model, {"checkpointing": {"policy": "every_n", "n": 2}})
    before = engine.checkpointing
    with pytest.raises(poise.Error):
        engine.set_checkpointing(policy)
    assert engine.checkpointing == before
    engine.step([x], lambda x: model(x).pow(2).mean())
    assert [block.runs for block in model.blocks] == [1, 2, 1, 2]


class Refusal(Exception):
    pass


def test_an_error_in_the_second_run_keeps_its_type_through_the_engine():
    def broken(x):
        y = model.inp(x).exp()
        if checkpointing.recomputing() and angry:
            raise Refusal("second")
        return model.head(y.exp())

    model, x = make()
    engine = poise.Engine(model, {"batch": {"micro_batch_size": 6}})
    angry = True
    for _ in range(2):
        with pytest.raises(Refusal, match="second"):
            engine.step([x], lambda x: checkpointing.recompute(broken, x).pow(2).mean())
    angry = False
    assert engine.step([x], lambda x: checkpointing.recompute(broken, x).pow(2).mean()).applied


def test_a_mismatch_keeps_its_type_through_the_engine():
    def half(x):
        return model(x[:3] if checkpointing.recomputing() else x)

    model, x = make()
    engine = poise.Engine(model, {"batch": {"micro_batch_size": 6}})
    with pytest.raises(poise.Error, match="recompute differs from forward"):
        engine.step([x], lambda x: checkpointing.recompute(half, x).pow(2).mean())
    assert engine.step([x], lambda x: model(x).pow(2).mean()).applied


def test_an_error_of_the_users_own_hooks_keeps_its_type_through_cpp():
    def pack(tensor):
        raise Refusal("not kept")

    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    targets = torch.zeros(4, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed),
        pytest.raises(Refusal, match="not kept"),
    ):
        poise.chunked_cross_entropy(hidden, weight, None, targets, 2)
    poise.chunked_cross_entropy(hidden, weight, None, targets, 2)[0].backward()


class Masked(nn.Module):
    """Draws its mask from a generator of its own."""

    def __init__(self, generator):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.generator = generator

    def forward(self, x, generator=None):
        y = self.linear(x).tanh()
        return (y * (torch.rand(y.shape, generator=generator or self.generator) > 0.5)).tanh() + x


def by_policy(policy):
    def through(blocks, generator, x):
        handle = checkpointing.apply(blocks, policy, units="?")
        y = blocks(x)
        handle.remove()
        return y

    return through


def by_call(call):
    def through(blocks, generator, x):
        for block in blocks:
            x = call(block, generator, x)
        return x

    return through


@pytest.mark.parametrize(
    "through",
    {
        "held by the block": by_policy("every_n"),
        "selective": by_policy("selective"),
        "of a module": by_call(lambda block, g, x: checkpointing.recompute(block, x)),
        "argument": by_call(lambda block, g, x: checkpointing.recompute(block, x, generator=g)),
        "closed over": by_call(
            lambda block, g, x: checkpointing.recompute(lambda y: block(y, g).sin(), x)
        ),
        "given": by_call(
            lambda block, g, x: checkpointing.recompute(
                lambda y, hidden=(block, g): hidden[0](y, hidden[1]).sin(), x, generators=[g]
            )
        ),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_generator_of_ones_own_draws_the_same_again(through, monkeypatch):
    # OLMo-core 828, with a generator of the user's: other masks in the second run, wrong gradients.
    def gradients():
        generator = torch.Generator().manual_seed(5)
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Masked(generator) for _ in range(3)))
        through[1](blocks, generator, torch.ones(2, 8)).square().sum().backward()
        return [torch.rand(3, generator=generator)] + [p.grad for p in blocks.parameters()]

    recomputed = gradients()
    monkeypatch.setattr(checkpointing, "recompute", plainly)
    monkeypatch.setattr(checkpointing, "apply", lambda *given, **more: checkpointing.Handle({}))
    assert_same_bits(recomputed, gradients())


def plainly(fn, *args, generators=(), **kwargs):
    return fn(*args, **kwargs)


class Shared(nn.Module):
    """Three blocks with one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)
        )
        for block in self.blocks[1:]:
            block[0].weight = self.blocks[0][0].weight

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("policy", ["every_n", "selective"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
def test_a_cast_that_is_cached_is_made_again(policy, inside):
    # pytorch 193338: found in the cache in forward, made anew in the second run, or the other way round.
    def gradients(apply):
        model, x = Shared(), torch.linspace(-1, 1, 32).reshape(4, 8)
        if apply:
            checkpointing.apply(model, policy)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad for p in model.parameters()]

    assert_same_bits(gradients(True), gradients(False))


@pytest.mark.parametrize("policy", ["none", "every_n"])
def test_a_pass_without_gradients_before_loses_none(policy):
    # pytorch 65766, 158232: weights cast without gradients stayed in autocast's cache, and had none after.
    def norm(first):
        model, x = make()
        model.eval()
        engine = poise.Engine(
            model, {"precision": {"dtype": "bf16"}, "checkpointing": {"policy": policy}}
        )

        def loss(x):
            if first:
                with torch.no_grad():
                    model(x)
            return model(x).float().pow(2).mean()

        return engine.step([x], loss).grad_norm

    assert norm(True) == norm(False) > 0


def test_a_region_left_early_holds_nothing():
    # pytorch 161186: tensors of a Function of the user's own stayed.
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2)
            ctx.beside = x * 3
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2 + 0 * (ctx.saved_tensors[0] + ctx.beside)

    linear = nn.Linear(8, 8)

    def fn(x):
        return Doubled.apply(linear(Doubled.apply(x)).tanh()).exp()

    with poise.memory.Ledger() as ledger:
        held = []
        for _ in range(50):
            x = torch.randn(64, 8, requires_grad=True)
            checkpointing.recompute(fn, x).sum().backward()
            linear.zero_grad()
            del x
            held.append(ledger.snapshot().current_bytes)
    assert set(held) == {0}
