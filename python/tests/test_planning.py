"""poise.plan: models traced without memory, held to what the engine then really holds."""

from __future__ import annotations

import json

import poise
import pytest
import torch
from poise import _C, fake_trace, planning
from poise.models.byte_gpt import ByteGPT
from torch import nn

MIB = 2**20
# Bytes inside operations (the scratch of fused attention), which a trace without memory cannot see.
SCRATCH = 0.005

pytestmark = pytest.mark.usefixtures("one_thread")


def byte_gpt():
    return ByteGPT(layers=4, width=128, heads=4, sequence_length=128)


def rows(count):
    return torch.randint(256, (count, 129), generator=torch.Generator().manual_seed(1))


def byte_loss(model):
    return lambda batch: model.loss(batch[:, :-1], batch[:, 1:])


def plan_bytes(model, count, **given):
    """Of a byte GPT and a batch of so many rows."""
    return poise.plan(model, rows(count), loss_fn=byte_loss(model), separable_loss=True, **given)


def measured_peak(model, batch_of, loss, plan):
    """Of an engine that follows the plan's settings, over two updates."""
    engine = poise.Engine(model, plan.settings)
    model.train()
    window = [batch_of(plan.micro_batch)] * plan.accumulation
    for _ in range(2):
        engine.step(window, lambda batch: (loss(batch), 1))
    return engine.memory()["peak_bytes"]


@pytest.mark.parametrize("budget", ["64MiB", "26MiB", "20MiB"])
def test_a_plan_holds_what_it_says(budget):
    model = byte_gpt()
    answer = plan_bytes(model, 4, global_batch_size=8, memory_budget=budget)
    assert answer.fits and answer.traced_by == "fake tensors"
    best = answer.best
    assert best.peak_bytes <= answer.budget_bytes
    measured = measured_peak(model, rows, byte_loss(model), best)
    assert measured == pytest.approx(best.peak_bytes, rel=SCRATCH)
    assert best.micro_batch * best.accumulation == 8


def test_it_says_what_the_description_says():
    model = byte_gpt()
    answer = plan_bytes(model, 1, global_batch_size=4)
    assert sum(answer.best.held.values()) == 16 * sum(
        -(-p.numel() // 256) * 256 for p in model.parameters()
    )
    moments = answer.moments()
    assert [name for name, _ in moments][:3] == [
        "forward of the embedding",
        "forward of blocks.0",
        "forward of blocks.1",
    ]
    assert max(sum(accounts.values()) for _, accounts in moments) == sum(
        answer.best.at_peak.values()
    )


def test_nothing_is_allocated_and_nothing_changes():
    with torch.device("meta"):
        model = ByteGPT(layers=2, width=2048, heads=16, sequence_length=1024)
    before = {name: id(p) for name, p in model.named_parameters()}
    model.eval()
    answer = poise.plan(
        model,
        torch.empty(2, 1025, dtype=torch.long, device="meta"),
        global_batch_size=64,
        loss_fn=byte_loss(model),
        separable_loss=True,
        gpus="8xH100-80GB",
        precision="bf16",
        gpu_hour=2.5,
    )
    assert answer.fits and answer.best.ranks == 8
    assert answer.cost.month == pytest.approx(8 * 2.5 * 730)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not model.training and all(p.device.type == "meta" for p in model.parameters())
    assert "forward" not in model.blocks[0].__dict__


class Uneven(nn.Module):
    """The last blocks hold far more than the first ones, for as many FLOPs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Wide(8 + 24 * i) for i in range(5))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wide(nn.Module):
    def __init__(self, copies):
        super().__init__()
        self.copies, self.linear = copies, nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.stack([torch.sin(self.linear(x) * i) for i in range(self.copies)]).mean(0)


def test_uneven_blocks_are_chosen_one_by_one():
    torch.manual_seed(0)
    model = Uneven()
    x = torch.randn(256, 16)
    free = poise.plan(model, x, global_batch_size=256, micro_batch_size=256)
    budget = int(0.75 * free.best.peak_bytes)
    answer = poise.plan(model, x, global_batch_size=256, micro_batch_size=256, memory_budget=budget)
    chosen = answer.best.recomputed
    assert answer.fits and 0 < len(chosen) < 5
    # No first ones: the blocks after them hold most.
    assert chosen != [f"blocks.{i}" for i in range(len(chosen))]
    assert answer.best.settings["checkpointing"] == {"policy": "list", "units": chosen}
    measured = measured_peak(model, lambda n: x[:n], lambda batch: model(batch).mean(), answer.best)
    assert measured <= 1.01 * budget
    assert measured == pytest.approx(answer.best.peak_bytes, rel=0.02)


def test_an_impossible_budget_says_what_is_missing_and_what_would_do():
    model = byte_gpt()
    answer = plan_bytes(model, 2, global_batch_size=4, memory_budget="10MiB")
    assert not answer.fits
    assert answer.missing_bytes == answer.floor_bytes - 10 * MIB > 0
    assert answer.dominated_by == "optimizer"
    again = plan_bytes(model, 2, global_batch_size=4, memory_budget=answer.floor_bytes)
    assert again.fits
    levers = {lever.name: lever for lever in answer.levers()}
    assert levers["optimizer states on the host"].fits
    assert not levers["optimizer states on the host"].changes_numbers
    assert levers["moments in 8 bits"].changes_numbers
    assert levers["moments in 8 bits"].plan.peak_bytes < answer.best.peak_bytes
    assert set(answer.best.offload.values()) == {"none"}


def test_activations_that_are_offloaded_are_traced():
    model = byte_gpt()
    arguments = {"global_batch_size": 8, "micro_batch_size": 8}
    kept = plan_bytes(model, 8, **arguments)
    job = plan_bytes(model, 8, **arguments, offload="host")._job
    job.may_offload([["none", "none", "none", "host"]])
    away = planning._plan(_C.plan_search(job).best, kept._units)
    assert away.settings["offload"] == {"activations": "host"}
    assert away.peak_bytes < 0.7 * kept.best.peak_bytes
    measured = measured_peak(model, rows, byte_loss(model), away)
    # The plan counts two of the largest tensors as on their way; one of them may be smaller.
    largest = 4 * 8 * 128 * 4 * 128
    assert away.peak_bytes - largest <= measured <= away.peak_bytes


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_moments_are_what_is_said(moments):
    model = byte_gpt()
    answer = plan_bytes(model, 1, global_batch_size=1, moments=moments)
    engine = poise.Engine(model, {"optimizer": {"moments": moments}})
    assert answer.best.held["optimizer"] == engine.memory()["current"]["optimizer"]


def test_factored_moments_are_rows_and_columns():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 5))
    images = torch.randn(2, 3, 16, 16)
    answer = poise.plan(model, images, global_batch_size=2, optimizer="adafactor")
    engine = poise.Engine(model, {"optimizer": {"type": "adafactor"}})
    assert answer.best.held["optimizer"] == engine.memory()["current"]["optimizer"] > 0


class LooksAtValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * float(x.detach().mean())  # a number that only data has


def test_a_model_that_cannot_be_traced_is_measured_and_that_is_said(caplog):
    model = LooksAtValues()
    before = [p.detach().clone() for p in model.parameters()]
    answer = poise.plan(model, torch.randn(8, 32), global_batch_size=8)
    assert answer.traced_by == "a measured micro-batch"
    assert "does not run without data" in answer.notes[0] and "does not run" in caplog.text
    assert all(map(torch.equal, before, model.parameters()))
    measured = measured_peak(
        model, lambda n: torch.randn(n, 32), lambda b: model(b).mean(), answer.best
    )
    assert measured == pytest.approx(answer.best.peak_bytes, rel=0.02)
    with pytest.raises(poise.Error, match="loss_fn of its own"):
        poise.plan(model, torch.randn(8, 32), global_batch_size=8, loss_fn=lambda b: model(b).sum())
    with pytest.raises(fake_trace.Untraceable, match="LooksAtValues does not run without data"):
        fake_trace.trace(
            model, lambda b: model(b).sum(), torch.randn(2, 32), blocks=[], recomputed=False
        )


def test_a_plan_draws_no_random_numbers():
    class Drops(LooksAtValues):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x))

    before = torch.get_rng_state()
    sample = torch.ones(8, 32)
    assert poise.plan(Drops(), sample, global_batch_size=8).traced_by == "a measured micro-batch"
    assert not torch.equal(before, torch.get_rng_state())  # its parameters
    model, before = Drops(), torch.get_rng_state()
    poise.plan(model, sample, global_batch_size=8)
    assert torch.equal(before, torch.get_rng_state())


def test_a_peak_while_the_engine_is_built_is_said_to_be_there():
    answer = poise.plan(
        "llama-3-8b", 128, global_batch_size=64, gpus="64xH100-80GB", precision="bf16"
    )
    whole = 2 * 8e9
    smallest = answer.front[-1]
    assert smallest.peak_bytes > whole > sum(smallest.at_peak.values())
    assert smallest.peak_moment == "building of the engine"


@pytest.mark.parametrize("model_on", ["cpu", "cuda"])
def test_a_model_that_names_its_device_is_traced_there(model_on, monkeypatch):
    """As on a machine with a GPU, which the tracer is told and stands in for here."""
    tried, trace = [], fake_trace.trace

    def traced(*args, device, **kwargs):
        tried.append(device.type)
        if device.type == "cpu":
            raise fake_trace.Untraceable("tensors on cuda and cpu")
        return trace(*args, **kwargs)

    monkeypatch.setattr(fake_trace, "trace", traced)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(planning.model_view, "device_of", lambda model: torch.device(model_on, 0))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    answer = poise.plan(model, torch.zeros(4, 3), global_batch_size=4, separable_loss=True)
    assert answer.traced_by == "fake tensors"
    assert tried[0] == model_on and set(tried[1:]) == {"cuda"}


def test_batch_norm_keeps_the_micro_batch():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    images = torch.randn(4, 3, 16, 16)
    answer = poise.plan(model, images, global_batch_size=16)
    assert answer.best.micro_batch == 4 and "BatchNorm" in answer.notes[0]
    sizes = {plan.micro_batch for plan in answer.front}
    assert sizes == {4}
    free = poise.plan(model, images, global_batch_size=16, separable_loss=True)
    assert len({plan.micro_batch for plan in free.front}) > 1 and not free.notes


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def of_pairs(model):
    """Contrastive: every row against all others of its micro-batch."""

    def loss(x):
        z = nn.functional.normalize(model(x), dim=-1)
        return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))

    return loss


BATCH = 512


def micro_batches(model, x, loss_fn=None, **given):
    answer = poise.plan(model, x, global_batch_size=BATCH, loss_fn=loss_fn, **given)
    return {plan.micro_batch for plan in (answer.best, *answer.front)}, answer.notes


def test_a_contrastive_loss_keeps_the_micro_batch_and_that_is_said():
    model, x = Encoder(), torch.randn(256, 16)
    sizes, notes = micro_batches(model, x, of_pairs(model))
    assert sizes == {256}
    assert "the loss is a mean without saying over how many" in notes[0]
    assert "stays 256" in notes[0] and "separable_loss=True" in notes[0]
    sizes, notes = micro_batches(model, x, of_pairs(model), separable_loss=True)
    assert len(sizes) > 1 and not notes
    sizes, notes = micro_batches(
        model, x, lambda x: (model(x).mean(), len(x)), separable_loss=False
    )
    assert sizes == {256} and "separable_loss is False" in notes[0]
    # The other levers are used.
    given = {"global_batch_size": BATCH, "loss_fn": of_pairs(model)}
    free = poise.plan(model, x, **given)
    tight = poise.plan(model, x, **given, memory_budget=free.floor_bytes)
    assert not free.best.recomputed and tight.best.recomputed
    assert tight.fits and tight.best.micro_batch == 256


@pytest.mark.parametrize("form", ["pair", "Loss", "sum", "per_token", "rows", "dictionary"])
def test_a_loss_that_says_what_it_is_over_may_be_split(form):
    class Says(Encoder):
        def forward(self, x):
            out = super().forward(x)
            return {"loss": out.mean(), "n": len(x)} if form == "dictionary" else out

    model, x = Says(), torch.randn(8, 16)
    losses = {
        "pair": lambda x: (model(x).mean(), len(x)),
        "Loss": lambda x: poise.Loss(model(x).mean(), count=len(x)),
        "sum": lambda x: poise.Loss(model(x).sum(), kind="sum"),
        "per_token": lambda x: poise.Loss(model(x), kind="per_token"),
    }
    sizes, notes = micro_batches(model, x, losses.get(form))
    assert len(sizes) > 1 and not notes


def test_a_head_of_transformers_may_be_split_unless_its_experts_see_the_micro_batch():
    sizes, notes = micro_batches(llama(), llama_batch(8))
    assert len(sizes) > 1 and not notes
    model = llama()
    model.config.output_router_logits = True
    sizes, notes = micro_batches(model, llama_batch(8))
    assert sizes == {8} and "balances its experts over a micro-batch" in notes[0]


def test_a_model_that_looks_at_values_and_returns_a_plain_loss_keeps_the_micro_batch():
    class Plain(LooksAtValues):
        def forward(self, x):
            return super().forward(x).mean()

    sizes, notes = micro_batches(Plain(), torch.randn(8, 32))
    assert sizes == {8} and "a mean without saying" in notes[0]
    sizes, notes = micro_batches(LooksAtValues(), torch.randn(8, 32))
    assert len(sizes) > 1 and "does not run without data" in notes[0]


def test_a_batch_may_be_a_mapping_of_its_own_kind():
    transformers = pytest.importorskip("transformers")
    model, plain = llama(), llama_batch(8)
    encoded = transformers.BatchEncoding(dict(plain))
    found = []
    for sample in (plain, encoded, [encoded]):
        answer = poise.plan(
            model, sample, global_batch_size=8,
            loss_fn=lambda b: model(**(b[0] if isinstance(b, list) else b)).loss,
        )  # fmt: skip
        assert answer.traced_by == "fake tensors"
        found.append((answer.best.micro_batch, answer.best.peak_bytes))
    assert len(set(found)) == 1


def test_what_returns_no_loss_and_no_tensor_is_said():
    class Nothing(nn.Linear):
        def forward(self, x):
            return {"name": "nothing"} if super().forward(x) is not None else None

    with pytest.raises(poise.Error, match="returned dict, which has no tensor"):
        poise.plan(Nothing(4, 4), torch.zeros(2, 4), global_batch_size=2)


def test_known_models_are_planned_by_name():
    answer = poise.plan(
        "llama-3-8b", 8192, global_batch_size=64, gpus="8xH100-80GB", precision="bf16"
    )
    assert answer.traced_by == "a description" and answer.fits
    assert answer.runner_up is not None and answer.why
    seconds = [plan.seconds["update"] for plan in answer.front]
    assert seconds == sorted(seconds)
    with pytest.raises(poise.Error, match="units, separable_loss with llama-3-8b, a known"):
        poise.plan("llama-3-8b", 128, global_batch_size=8, units=["x"], separable_loss=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": "8xZ9000"}, r"unknown device \"Z9000\"; known are .*H100-80GB"),
        ({"gpus": "8xA100-80GB", "global_batch_size": 60}, "the nearest that are: 56 and 64"),
        ({"precision": "int4"}, "unknown precision 'int4'; use one of fp32"),
        ({"offload": "moon"}, "unknown place to offload to: 'moon'"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; give 1 or more"),
        ({"micro_batch_size": 3}, "does not divide the 64 sequences of each rank"),
    ],
)
def test_what_cannot_be_planned_is_named(change, message):
    model = byte_gpt()
    arguments = {
        "global_batch_size": 64,
        "loss_fn": byte_loss(model),
        "separable_loss": True,
        **change,
    }
    with pytest.raises(poise.Error, match=message):
        poise.plan(model, rows(2), **arguments)


def test_unknown_models_and_samples_are_named():
    with pytest.raises(poise.Error, match='unknown model "lama"; known are .*llama-3-8b'):
        poise.plan("lama", 1024, global_batch_size=8)
    with pytest.raises(poise.Error, match="give the tokens of a sequence"):
        poise.plan("gpt2", rows(2), global_batch_size=8)
    with pytest.raises(poise.Error, match="holds no tensor with samples"):
        poise.plan(byte_gpt(), {"a": 1}, global_batch_size=8)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def llama_batch(count):
    ids = torch.randint(500, (count, 64), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("budget", [None, "9MiB"])
def test_a_llama_of_transformers_is_traced_and_holds_what_was_said(budget):
    model = llama()
    answer = poise.plan(model, llama_batch(2), global_batch_size=4, memory_budget=budget)
    assert answer.traced_by == "fake tensors" and answer.fits
    if budget is not None:
        assert answer.best.recomputed or answer.best.micro_batch < 4
    measured = measured_peak(model, llama_batch, lambda batch: model(**batch).loss, answer.best)
    assert measured == pytest.approx(answer.best.peak_bytes, rel=SCRATCH)


def test_inputs_that_recomputed_blocks_keep_are_there_at_the_head():
    """The first block's, which the model's own forward lets go elsewhere."""
    model = llama()
    answer = poise.plan(
        model, llama_batch(4), global_batch_size=4, micro_batch_size=4, precision="bf16",
        memory_budget=1,
    )  # fmt: skip
    assert len(answer.best.recomputed) == 4 and "head" in answer.best.peak_moment
    engine = poise.Engine(
        model, {**answer.best.settings, "precision": {"dtype": "bf16", "parameters": "bf16"}}
    )
    for _ in range(2):
        engine.step([llama_batch(4)], lambda batch: (model(**batch).loss, 1))
    assert engine.memory()["peak_bytes"] == answer.best.peak_bytes


def test_a_mask_is_counted_as_one_that_masks():
    """transformers drops a mask of ones, which only data can tell: less is held then, never more."""

    def masked(count):
        batch = llama_batch(count)
        mask = torch.ones_like(batch["input_ids"])
        mask[:, -1] = 0
        return {**batch, "attention_mask": mask}

    model = llama()
    answer = poise.plan(model, masked(2), global_batch_size=4)

    def run(batch):
        return model(**batch).loss

    measured = measured_peak(model, masked, run, answer.best)
    assert measured == pytest.approx(answer.best.peak_bytes, rel=SCRATCH)


def test_frozen_parameters_hold_no_states():
    model = byte_gpt()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    answer = plan_bytes(model, 2, global_batch_size=2)
    measured = measured_peak(model, rows, byte_loss(model), answer.best)
    assert measured == pytest.approx(answer.best.peak_bytes, rel=0.03)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wide(4) for _ in range(3))

    def forward(self, x):
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_blocks_that_run_twice_are_recomputed_all_or_none(share):
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(64, 64)
    free = poise.plan(model, x, global_batch_size=64, micro_batch_size=64)
    budget = int(share * free.best.peak_bytes)
    answer = poise.plan(model, x, global_batch_size=64, micro_batch_size=64, memory_budget=budget)
    assert answer.best.recomputed == ([] if share == 1 else ["blocks.0", "blocks.1", "blocks.2"])
    measured = measured_peak(model, lambda n: x[:n], lambda b: model(b).mean(), answer.best)
    # A recomputed forward puts the generator's state (5 KB) back after it.
    assert measured == pytest.approx(answer.best.peak_bytes, abs=8192)


def test_a_cpu_that_was_measured_is_the_one_that_is_planned_for(tmp_path, monkeypatch):
    model, x = nn.Linear(64, 64), torch.randn(4, 64)

    def seconds():
        return poise.plan(model, x, global_batch_size=4).best.seconds["update"]

    monkeypatch.setenv("POISE_MACHINE", str(tmp_path / "none.json"))
    guessed = seconds()
    slow = {"float_flops": 1e3, "half_flops": 1e3, "memory_rate": 1e3, "efficiency": 1.0}
    (tmp_path / "machine.json").write_text(json.dumps(slow))
    assert seconds() == guessed
    monkeypatch.setenv("POISE_MACHINE", str(tmp_path / "machine.json"))
    assert seconds() > 10 * guessed
