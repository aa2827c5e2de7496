"""The balance between micro-batch and recomputation, found within a budget and held to what happens."""

import collections
import dataclasses
import itertools
import random
import types

import poise
import pytest
import torch
from balanced_runs import BLOCKS, LENGTH, Net, batch_of, call, engine_of, samples, train
from poise import automatic_budget, balance, trace, trainer_balance
from poise.balance import Candidate
from poise.measured_fit import Fit, peak_of
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def step_peak(engine, size, accumulation, loss):
    return engine.step([batch_of(size)] * accumulation, loss).peak_bytes


@pytest.mark.parametrize("recomputed", [0, 1, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_every_mixture_holds_what_was_predicted_from_four_small_runs(size, recomputed):
    model = Net()
    engine = engine_of(model)
    loss = call(model)
    found = balance.find(engine, batch_of, loss, samples=16, budget=1 << 40)
    assert found.candidates == 5 * (BLOCKS + 1)  # micro-batches 1, 2, 4, 8, 16
    fits = [
        Fit.of(engine, policy, [1, 2], batch_of, loss)
        for policy in ({"policy": "first_m", "n": BLOCKS}, {"policy": "none"})
    ]
    predicted = next(
        c
        for c in balance._candidates(fits, [1, 2, 8, 16], 16, BLOCKS)
        if (c.micro_batch, c.recomputed) == (size, recomputed)
    )
    engine.set_checkpointing(predicted.checkpointing)
    measured = step_peak(engine, size, 16 // size, loss)
    assert measured == pytest.approx(predicted.peak, rel=0.01)


def test_a_trace_changes_nothing():
    model = Net(dropout=0.3)
    engine, other = engine_of(model), None
    torch.manual_seed(5)
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    trace.measure(engine, batch_of(2), call(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, model.parameters()))
    with_trace = engine.step([batch_of(2)], call(model)).loss

    torch.manual_seed(5)
    other_model = Net(dropout=0.3)
    other_model.load_state_dict(dict(zip(model.state_dict(), before, strict=True)))
    other = engine_of(other_model)
    torch.manual_seed(5)
    assert other.step([batch_of(2)], call(other_model)).loss == with_trace


def test_running_statistics_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    engine = engine_of(model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    trace.measure(engine, torch.randn(8, 4), lambda batch: (model(batch).mean(), len(batch)))
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_blocks_that_run_twice_are_seen_as_one_link():
    class Shared(Net):
        def forward(self, ids, labels):
            hidden = self.embedding(ids)
            for block in [*self.blocks, *self.blocks]:
                hidden = block(hidden)
            loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
            return loss, labels.numel()

    model = Shared()
    engine = engine_of(model)
    assert len(trace.measure(engine, batch_of(2), call(model)).links) == 1
    found = balance.find(engine, batch_of, call(model), samples=16, budget=1 << 40)
    assert {c.recomputed for c in found.front} <= {0, BLOCKS}
    measured = step_peak(engine, found.chosen.micro_batch, found.chosen.accumulation, call(model))
    # One link's peak is no line over the micro-batch: the run that made sure is what holds.
    assert measured == pytest.approx(found.measured, rel=0.001)
    assert measured == pytest.approx(found.chosen.peak, rel=0.05)


class DropsLayers(Net):
    """Leaves out a block now and then, by numbers that a trial does not put back."""

    def __init__(self, seed=0):
        super().__init__()
        self.draws = random.Random(seed)

    def forward(self, ids, labels):
        hidden = self.embedding(ids)
        for block in self.blocks:
            if self.draws.random() > 0.15:
                hidden = block(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return loss, labels.numel()


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_blocks_that_are_left_out_now_and_then_are_seen_as_one_link(seed):
    model = DropsLayers(seed)
    engine = engine_of(model)
    found = balance.find(engine, batch_of, call(model), samples=16, budget=1 << 40)
    assert found.fits and found.measured > 0


def test_a_chain_as_one_link_has_its_moments():
    generator = torch.Generator().manual_seed(0)
    model = Net()
    engine = engine_of(model)
    chain = trace.measure(engine, batch_of(2), call(model)).links
    alone = trace._run(engine, [], batch_of(2), call(model)).links
    assert len(chain) == BLOCKS + 2 and [trace.joined(chain)] == alone
    for _ in range(20):
        links = [
            trace.Link(*(int(n) for n in torch.randint(0, 100, (3,), generator=generator)))
            for _ in range(4)
        ]
        assert peak_of([trace.joined(links)]) == peak_of(links)


class Keeps(Net):
    """Keeps what it returned, with the graph behind it."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, ids, labels):
        loss, count = super().forward(ids, labels)
        self.kept.append(loss)
        self.kept.append(torch.ones(1000) * loss)  # 4000 bytes, and their graph
        return loss, count


def test_what_stays_held_after_a_window_is_said_and_counted(caplog):
    measured = {}
    for kind in (Net, Keeps):
        caplog.clear()
        engine = engine_of(kind())
        found = balance.find(
            engine, batch_of, call(engine.model), samples=4, budget=1 << 30, recompute=False
        )
        measured[kind] = found.measured
        held = engine.memory()["current"]["activations"]
        said = [r.getMessage() for r in caplog.records if "stayed held" in r.getMessage()]
        assert bool(said) == (kind is Keeps) == (held > 0)
    assert "activations" in said[0]
    # The second of the two windows came on top of what the first one left.
    assert measured[Keeps] > measured[Net] + 4000


def test_the_peak_of_a_chain_is_the_highest_of_all_its_moments():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        links = [
            trace.Link(*(int(n) for n in torch.randint(0, 100, (3,), generator=generator)))
            for _ in range(int(torch.randint(1, 7, (1,), generator=generator)))
        ]
        kept = [0, *itertools.accumulate(link.saved for link in links)]
        moments = [
            kept[i] + peak
            for i, link in enumerate(links)
            for peak in (link.forward_peak, link.backward_peak)
        ]
        assert peak_of(links) == max(0, *moments)


def test_budget_and_global_batch_are_all_a_trainer_needs(tmp_path):
    whole, loss = train(tmp_path / "whole", per_device_train_batch_size=16)
    peak = whole.engine.memory()["peak_bytes"]
    for share in (1.0, 0.6, 0.35):
        budget = int(peak * share)
        trainer, found_loss = train(tmp_path / str(share), memory_budget=budget)
        args = trainer.args
        assert args.per_device_train_batch_size * args.accumulation == 16
        held = trainer.engine.memory()["peak_bytes"]
        assert held <= budget
        assert found_loss == pytest.approx(loss, rel=1e-5)
    assert args.per_device_train_batch_size < 16 or args.checkpointing["policy"] != "none"


def test_a_model_that_is_compiled_as_a_whole_recomputes_no_blocks(tmp_path):
    torch.manual_seed(1)
    compiled = torch.compile(Net(), backend="eager")
    trainer, loss = train(tmp_path / "compiled", compiled, memory_budget="64MiB")
    assert trainer._found.chosen.recomputed == 0 and trainer._found.may_split
    size = trainer.args.per_device_train_batch_size
    torch.manual_seed(1)
    _, other = train(tmp_path / "plain", Net(), per_device_train_batch_size=size)
    assert loss == pytest.approx(other, rel=0.01)


def test_a_clock_that_says_recomputing_is_faster_is_not_believed(tmp_path, monkeypatch):
    """On a busy machine one of two short runs may be held up."""
    real = trace.measure

    def measure(engine, batch, loss_fn):
        found = real(engine, batch, loss_fn)
        again = engine.checkpointing["policy"] != "none"
        return dataclasses.replace(found, seconds=found.seconds * (1 if again else 50))

    monkeypatch.setattr(trace, "measure", measure)
    trainer, _ = train(tmp_path, memory_budget="1GiB")
    assert trainer._found.chosen.recomputed == 0


def test_what_is_given_stays(tmp_path):
    trainer, _ = train(tmp_path, memory_budget="64MiB", per_device_train_batch_size=2)
    assert trainer.args.per_device_train_batch_size == 2 and trainer._found is None
    trainer, _ = train(tmp_path, memory_budget="64MiB", gradient_checkpointing=True)
    assert trainer.args.checkpointing["policy"] == "every_n"


def test_a_loss_that_may_depend_on_the_micro_batch_is_not_split(tmp_path, caplog):
    unknown = Net(says_count=False)
    trainer, _ = train(tmp_path, model=unknown, memory_budget="64MiB")
    assert trainer.args.per_device_train_batch_size == 8
    assert trainer._found.candidates == BLOCKS + 1
    assert "separable_loss=True" in caplog.text
    caplog.clear()
    trainer, _ = train(
        tmp_path, model=Net(says_count=False), memory_budget="64MiB", separable_loss=True
    )
    assert trainer._found.candidates == 5 * (BLOCKS + 1)
    assert not caplog.text


class NetForSequenceClassification(Net):
    """By its name the loss that it returns is a mean over samples."""

    def forward(self, ids, labels=None):
        if labels is not None:
            return super().forward(ids, labels)
        return (self.head(self.embedding(ids)).mean(1),)


def of_pairs(outputs, labels):
    """Contrastive: every sample against all others of its micro-batch."""
    embeddings = nn.functional.normalize(outputs[0], dim=-1)
    return nn.functional.cross_entropy(
        embeddings @ embeddings.T, torch.arange(len(labels), device=labels.device)
    )


class OfPairs(poise.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = of_pairs(outputs, labels)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("given", [{"compute_loss_func": of_pairs}, {"kind": OfPairs}])
def test_a_contrastive_loss_is_not_split_whatever_its_model_is_called(tmp_path, caplog, given):
    model = NetForSequenceClassification()
    trainer, _ = train(tmp_path, model=model, memory_budget="64MiB", trainer=given)
    assert trainer.args.per_device_train_batch_size == 8 and trainer._halving is None
    assert "the loss is a mean without saying" in caplog.text
    caplog.clear()
    trainer, _ = train(tmp_path, model=NetForSequenceClassification(), memory_budget="64MiB")
    assert trainer._halving is not None and not caplog.text


def test_data_with_batches_of_its_own_cannot_be_split(tmp_path):
    args = poise.TrainingArguments(
        str(tmp_path), global_batch_size=8, memory_budget="64MiB", use_cpu=True
    )
    loader = torch.utils.data.DataLoader(samples(), batch_size=4)
    with pytest.raises(poise.Error, match="DataLoader, which cannot be split anew"):
        poise.Trainer(Net(), args, train_dataset=loader).train()
    args = poise.TrainingArguments(
        str(tmp_path),
        global_batch_size=8,
        memory_budget="64MiB",
        dataloader_drop_last=True,
        use_cpu=True,
    )
    with pytest.raises(poise.Error, match="dataloader_drop_last with an open micro-batch"):
        poise.Trainer(Net(), args, train_dataset=samples()).train()


def test_auto_needs_a_device_of_its_own(tmp_path):
    with pytest.raises(poise.Error, match="memory_budget is auto, but this run is on the CPU"):
        poise.TrainingArguments(str(tmp_path), memory_budget="auto", use_cpu=True)


GIB = 1 << 30


class OtherRanks:
    """A group whose other ranks say what is given."""

    def __init__(self, *said):
        self.size, self._said = 1 + len(said), list(said)

    def all_gather_text(self, text, what):
        return [text, *self._said]


@pytest.fixture
def a_gpu(monkeypatch):
    """One of 80 GiB, 10 of them free and 30 in the caching allocator of this process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * GIB)
    whole = types.SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: whole)


def test_auto_is_what_the_fullest_gpu_has_free_on_every_rank(tmp_path, a_gpu):
    args = poise.TrainingArguments(str(tmp_path), memory_budget="auto")
    mine = 40 * GIB - int(1.5 * GIB) - 80 * GIB // 50  # less the planner's reserve
    for others, budget in [((), mine), ((mine + 5,), mine), ((mine + 5, mine - 7), mine - 7)]:
        found = automatic_budget.settled(args, OtherRanks(*map(str, others)))
        assert found.memory_budget == budget
        assert found.to_config(10)["memory"] == {"budget_bytes": budget}
    assert args.memory_budget == "auto"  # of the next Trainer


def test_auto_on_a_full_gpu_is_refused(tmp_path, a_gpu):
    args = poise.TrainingArguments(str(tmp_path), memory_budget="auto")
    with pytest.raises(
        poise.Error, match="no more free than the 3.10 GiB that are left to its lib"
    ):
        automatic_budget.settled(args, OtherRanks("-4"))


def test_what_others_hold_on_the_gpu_is_no_room_for_the_engine(monkeypatch):
    def find(budget):
        engine = engine_of(Net())
        return balance.find(engine, batch_of, call(engine.model), samples=4, budget=budget)

    least = min(find(GIB).front, key=lambda one: one.peak).peak
    monkeypatch.setattr(trace, "held_besides", lambda engine: GIB)
    assert find(2 * GIB).chosen.peak < GIB
    with pytest.raises(
        balance.NothingFits, match="of which what is not the engine's holds 1.00 GiB"
    ):
        find(GIB + least // 2)


@pytest.mark.parametrize(("name", "said"), [("cudaMallocAsync", True), ("native", False)])
def test_an_allocator_that_tells_nothing_is_said_in_the_plan(monkeypatch, caplog, name, said):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: name)
    assert trace.untold(torch.device("cuda", 0)) == (name if said else "")
    assert trace.untold(torch.device("cpu")) == ""
    monkeypatch.setattr(trace, "untold", lambda device: name if said else "")
    engine = engine_of(Net())
    balance.find(engine, batch_of, call(engine.model), samples=2, budget=GIB)
    assert ("the GPU's allocator cudaMallocAsync does not tell" in caplog.text) == said


@pytest.mark.parametrize(("dropout", "norm"), [(0.0, False), (0.5, False), (0.5, True)])
def test_out_of_memory_halves_and_runs_the_same_window_again(dropout, norm):
    def losses(parts, budget):
        torch.manual_seed(2)
        model = Net(dropout, norm=norm)
        engine = engine_of(model)
        notes = []
        halving = trainer_balance.Halving(engine, notes.append)
        halving.parts = parts
        if budget:
            whole = trace.measure(engine, batch_of(8), call(model))
            engine = engine_of(
                model, memory={"budget_bytes": int(sum(whole.held.values()) * 1.0 + budget)}
            )
            halving = trainer_balance.Halving(engine, notes.append)
        torch.manual_seed(2)
        out = [
            halving([batch_of(8)], lambda window: engine.step(window, call(model))).loss
            for _ in range(3)
        ]
        # Running statistics are those of what was trained on, not of what ran out.
        return [*out, *(b.double().sum().item() for b in model.buffers())], notes, halving.parts

    eight = Net(dropout, norm=norm)
    engine = engine_of(eight)
    links = trace.measure(engine, batch_of(8), call(eight)).links
    budget = int(peak_of(links) * 0.7)
    ran_out, notes, parts = losses(1, budget)
    assert parts == 2 and len(notes) == 1 and "halves" in notes[0]
    # As if it had been run in halves from the start: the same random numbers too.
    assert ran_out == losses(2, 0)[0]


def test_one_sample_that_does_not_fit_is_an_error():
    model = Net()
    engine = engine_of(model)
    held = sum(engine.memory()["current"].values())
    engine = engine_of(model, memory={"budget_bytes": held + 1000})
    halving = trainer_balance.Halving(engine, lambda line: None)
    with pytest.raises(torch.OutOfMemoryError):
        halving([batch_of(4)], lambda window: engine.step(window, call(model)))
    assert halving.parts == 4


def test_batches_are_split_by_their_rows():
    batch = {"ids": torch.arange(6).view(3, 2), "scale": torch.tensor(2.0), "name": "x"}
    parts = list(trainer_balance.split(batch, 2))
    assert [p["ids"].tolist() for p in parts] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert all(p["scale"] == 2.0 and p["name"] == "x" for p in parts)
    assert len(list(trainer_balance.split((torch.zeros(2, 3),), 8))) == 2
    assert next(trainer_balance.split(batch, 1)) is batch


def test_lists_with_an_entry_for_each_sample_are_split_too():
    rows = torch.arange(4)
    targets = [{"boxes": torch.zeros(n, 4)} for n in (4, 1, 2, 3)]  # one as long as the batch
    batch = collections.UserDict(
        x=rows, texts=list("abcd"), targets=targets, pair=(rows, rows), layers=[rows] * 4, names=["a", "b"]
    )  # fmt: skip
    first, second = trainer_balance.split(batch, 2)
    assert (first["texts"], second["texts"]) == (["a", "b"], ["c", "d"])
    assert first["targets"] == targets[:2] and second["targets"] == targets[2:]
    assert [len(one) for one in (*first["pair"], *first["layers"])] == [2] * 6
    assert first["names"] == ["a", "b"] and type(first) is collections.UserDict
    # The batch itself is a structure.
    assert [
        len(one) for one in next(trainer_balance.split([torch.zeros(2, 3), torch.ones(2)], 2))
    ] == [1, 1]


def test_candidates_name_their_section():
    assert Candidate(1, 1, 0, 0, 0.0).checkpointing == {"policy": "none"}
    assert Candidate(1, 1, 3, 0, 0.0).checkpointing == {"policy": "first_m", "n": 3}


def test_what_may_not_be_split_is_not_halved_either(tmp_path):
    class Norm(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(LENGTH)

        def forward(self, ids, labels):
            logits = self.head(self.norm(self.embedding(ids))).flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels.flatten()), labels.numel()

    trainer, _ = train(tmp_path / "norm", model=Norm(), memory_budget="64MiB")
    assert not trainer._found.may_split and trainer._halving is None
    trainer, _ = train(tmp_path / "net", memory_budget="64MiB")
    assert trainer._found.may_split and trainer._halving is not None


def test_a_collator_that_draws_numbers_draws_what_it_would_without_a_plan(tmp_path):
    def run(folder, **arguments):
        drawn = []

        def collate(rows):
            drawn.append((torch.rand(()).item(), random.random()))
            return torch.utils.data.default_collate(rows)

        torch.manual_seed(1)
        args = poise.TrainingArguments(
            str(folder),
            global_batch_size=16,
            max_steps=2,
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        )
        trainer = poise.Trainer(Net(), args, data_collator=collate, train_dataset=samples())
        trainer.train()
        return drawn, trainer.args.per_device_train_batch_size

    planned, micro_batch = run(tmp_path / "planned", memory_budget="64MiB")
    given, _ = run(tmp_path / "given", per_device_train_batch_size=micro_batch)
    first = len(planned) - len(given)
    assert first > 0 and planned[first:] == given


def candidates(*rows):
    return [Candidate(size, 16 // size, recomputed, peak, s) for size, recomputed, peak, s in rows]


@pytest.fixture
def stub_engine():
    class Group:
        size = 1

    class Stub:
        group = Group()

        def __init__(self):
            self.policies = []

        def set_checkpointing(self, policy):
            self.policies.append(policy)

    return Stub()


def fastest(engine, rows, runs, monkeypatch, budget=1000):
    """`runs`: (peak, seconds of a micro-batch) by micro-batch, or None."""
    monkeypatch.setattr(balance, "_run", lambda engine, size, loss: runs[size])
    return balance._fastest(engine, rows, budget, lambda size: size, None, several=True)


def test_candidates_that_are_close_are_run_and_the_fastest_is_taken(stub_engine, monkeypatch):
    rows = candidates((8, 0, 500, 1.0), (4, 0, 300, 1.05), (2, 0, 200, 1.1), (1, 0, 100, 9.0))
    runs = {8: (500, 1.0), 4: (300, 0.2), 2: (200, 0.2)}  # updates: 2.0, 0.8, 1.6
    found = fastest(stub_engine, rows, runs, monkeypatch)
    assert found[0].micro_batch == 4 and found[1] == 300
    assert len(stub_engine.policies) == 3  # what is far slower is not run


def test_what_turns_out_too_large_is_left(stub_engine, monkeypatch):
    rows = candidates((8, 0, 990, 1.0), (8, 2, 900, 1.05), (4, 0, 300, 1.1))
    runs = {8: (1001, 0.1), 4: (300, 0.5)}
    assert fastest(stub_engine, rows, runs, monkeypatch)[0].micro_batch == 4
    assert fastest(stub_engine, rows, {8: None, 4: None}, monkeypatch) is None


def test_more_recomputation_alone_is_not_run(stub_engine, monkeypatch):
    rows = candidates((8, 0, 500, 1.0), (8, 1, 450, 1.01), (8, 2, 400, 1.02), (4, 1, 300, 1.03))
    fastest(stub_engine, rows, {8: (500, 0.1), 4: (300, 0.5)}, monkeypatch)
    assert len(stub_engine.policies) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_lines_go_through_the_nearest_measured_micro_batches(size):
    def traced(n):
        link = trace.Link(10 * n, 20 * n, max(100, 30 * n))  # a peak that bends
        return trace.Trace([link], 1.0 + 0.1 * n, {"parameters": 5})

    fit = Fit([(n, traced(n)) for n in (1, 2, 8)])
    links = fit.links(size)[0]
    assert (links.saved, links.forward_peak) == (10 * size, 20 * size)
    assert links.backward_peak >= max(100, 30 * size) or size > 8
    if size in (1, 2, 8):
        assert links.backward_peak == max(100, 30 * size)
    assert fit.seconds(size) == pytest.approx(1.0 + 0.1 * size)
    assert Fit([(1, traced(1))]).known == 1


def test_the_largest_micro_batch_that_fits_is_run_too(monkeypatch):
    model = Net()
    engine = engine_of(model)
    sizes = []
    real = trace.measure

    def measure(engine, batch, loss):
        sizes.append(len(batch["ids"]))
        return real(engine, batch, loss)

    monkeypatch.setattr(trace, "measure", measure)
    policy = {"policy": "none"}
    wide = Fit.of(engine, policy, [1, 2, 4, 8, 16], batch_of, call(model), 1 << 40)
    assert sorted(set(sizes)) == [1, 2, 16]
    sizes.clear()
    low, high = (sum(wide.held.values()) + peak_of(wide.links(n)) for n in (4, 8))
    Fit.of(engine, policy, [1, 2, 4, 8, 16], batch_of, call(model), (low + high) // 2 / 0.9)
    assert sorted(set(sizes)) == [1, 2, 4]


def test_seconds_are_compared_with_what_they_were():
    model = Net()
    engine = engine_of(model)
    found = balance.find(engine, batch_of, call(model), samples=4, budget=1 << 30)
    chosen = found.chosen
    result = engine.step([batch_of(chosen.micro_batch)] * chosen.accumulation, call(model))
    lines = trainer_balance.compared(found, result)
    assert lines[0].startswith("  plan: peak ")
    seconds = result.forward_seconds + result.backward_seconds
    assert f"{chosen.seconds:.3g} s predicted, {seconds:.3g} s measured" in lines[2]
