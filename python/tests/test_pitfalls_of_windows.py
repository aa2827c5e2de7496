"""What goes wrong in windows, precision and recomputation of other trainers, by the behaviour that is
right (see test_pitfalls.py)."""

import copy
import math

import poise
import pytest
import torch
import torch.nn.functional as F
from hf_models import causal_rows, made
from test_hf_trainer import arguments, losses
from tiny_models import same_bits
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def updates(trainer, key):
    return [line[key] for line in trainer.state.log_history if "loss" in line]


# Windows.


class Pairs(nn.Module):
    """Scores of a chosen and a rejected answer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(4, 1)

    def forward(self, chosen, rejected):
        return self.score(chosen) - self.score(rejected)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_pairwise_loss_is_the_mean_over_pairs_whatever_the_window(size, tmp_path):
    # LlamaFactory 5747: 1.0 became 9.
    generator = torch.Generator().manual_seed(1)
    data = [
        {k: torch.randn(4, generator=generator) for k in ("chosen", "rejected")} for _ in range(8)
    ]

    def dpo(outputs, labels, num_items_in_batch=None):
        return -F.logsigmoid(outputs).mean()

    with torch.no_grad():
        whole = {k: torch.stack([row[k] for row in data]) for k in data[0]}
        expected = float(dpo(Pairs()(**whole), None))
    args = arguments(
        tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
    )
    trainer = poise.Trainer(Pairs(), args, train_dataset=data, compute_loss_func=dpo)
    trainer.train()
    assert losses(trainer) == pytest.approx([expected], rel=1e-6)


def test_a_loss_that_was_divided_by_the_items_is_not_divided_again(tmp_path):
    # trl 5619, ms-swift 10117: a quarter of the gradient at a window of 4.
    def summed(outputs, labels, num_items_in_batch=None):
        loss = F.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        return loss / num_items_in_batch

    seen = []
    for function in (None, summed):
        trainer = poise.Trainer(
            made("gpt2"),
            arguments(tmp_path),
            train_dataset=causal_rows(16),
            compute_loss_func=function,
        )
        trainer.train()
        seen.append([*losses(trainer), *updates(trainer, "grad_norm")])
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


def test_a_router_loss_weighs_the_same_in_every_window(tmp_path):
    # transformers, trl, Automodel 3359: G times too heavy. The same rows again and again, since a
    # balance loss is no sum over tokens.
    row = causal_rows(3)[2]
    seen = []
    for accumulation in (1, 4):
        model = made("mixtral")
        model.config.output_router_logits = True
        model.router_aux_loss_coef = model.config.router_aux_loss_coef = 0.5
        args = arguments(tmp_path, gradient_accumulation_steps=accumulation, num_train_epochs=1)
        rows = [row] * 2 * accumulation
        trainer = poise.Trainer(model, args, train_dataset=rows)
        trainer.train()
        seen.append([*losses(trainer), *updates(trainer, "grad_norm")])
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


def test_a_mean_without_a_count_says_what_it_means_and_what_to_do(caplog):
    # unsloth 3253, 3344: a warning that nobody understands.
    model = nn.Linear(2, 1)
    caplog.set_level("INFO", logger="poise")
    engine = poise.Engine(model, {"batch": {"accumulation": 2}})
    for _ in range(2):
        engine.step([torch.ones(3, 2)] * 2, lambda x: model(x).mean())
    told = [r.getMessage() for r in caplog.records if "micro_batch_mean" in r.getMessage()]
    assert len(told) == 1 and "count" in told[0]


def test_a_second_trainer_makes_the_same_number_of_updates(tmp_path):
    # unsloth 1194.
    totals = []
    for kind in (poise.TrainingArguments, poise.Seq2SeqTrainingArguments):
        trainer = poise.Trainer(
            made("gpt2"), arguments(tmp_path, kind), train_dataset=causal_rows(11)
        )
        totals += [trainer.train().global_step, trainer.train().global_step]
    assert totals == [2] * 4


def test_two_models_in_one_loop_both_train_as_on_the_big_batch():
    # accelerate 668, 1414; diffusers 5334: only one accumulated.
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(2, 3, generator=generator) for _ in range(4)]
    real = [torch.randn(2, 3, generator=generator) for _ in range(4)]

    def nets():
        torch.manual_seed(3)
        return nn.Linear(3, 3), nn.Linear(3, 1)

    def critic_loss(maker, critic, z, x):
        return F.softplus(critic(maker(z).detach())).mean() + F.softplus(-critic(x)).mean()

    maker, critic = nets()
    runs = [
        poise.wrap(m, torch.optim.SGD(m.parameters(), lr=0.1), accumulation=4)
        for m in (maker, critic)
    ]
    for z, x in zip(noise, real, strict=True):
        runs[1].model.backward(critic_loss(*(run.model for run in runs), z, x), tokens=2)
        runs[1].optimizer.step()
    for z in noise:
        runs[0].model.backward(F.softplus(-critic(runs[0].model(z))).mean(), tokens=2)
        runs[0].optimizer.step()
    a, b = nets()
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]
    critic_loss(a, b, torch.cat(noise), torch.cat(real)).backward()
    sgd[1].step()
    sgd[0].zero_grad()
    F.softplus(-b(a(torch.cat(noise)))).mean().backward()
    sgd[0].step()
    for ours, plain in zip(
        [*maker.parameters(), *critic.parameters()], [*a.parameters(), *b.parameters()], strict=True
    ):
        assert torch.allclose(ours, plain, atol=1e-6)


@pytest.mark.parametrize("accumulation", [2, 8])
def test_a_last_batch_that_is_cut_into_parts_is_one_update(accumulation):
    # accelerate 1847: each part of the loader's last batch made an update.
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(3, generator=generator), torch.randn(1, generator=generator))
        for _ in range(12)
    ]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    plain = copy.deepcopy(model)
    run, sgd, _, loader = poise.wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        None,
        torch.utils.data.DataLoader(data, batch_size=4),
        accumulation=accumulation,
    )
    for x, y in loader:
        for part in range(2):
            rows = slice(2 * part, 2 * part + 2)
            run.backward(F.mse_loss(run(x[rows]), y[rows]), tokens=2)
            sgd.step()
    size = min(12, 2 * accumulation)
    windows = [data[i : i + size] for i in range(0, 12, size)]
    assert run.engine.updates == len(windows)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for window in windows:
        reference.zero_grad()
        x, y = (torch.stack(column) for column in zip(*window, strict=True))
        F.mse_loss(plain(x), y).backward()
        reference.step()
    assert torch.allclose(model.weight, plain.weight, atol=1e-6)


def test_clipping_before_there_is_a_gradient_is_an_error():
    # nano-world-model 22: clipped before backward, to no effect and unsaid.
    model = nn.Linear(2, 1)
    run, sgd, *_ = poise.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation=2)
    before = model.weight.detach().clone()
    for _ in range(2):
        with pytest.raises(poise.Error, match="before backward.*between backward"):
            run.clip_grad_norm_(model.parameters(), 1.0)
        for norm in (None, 20**0.5):  # of a mean over rows [4, 2] in both micro-batches
            run.backward(run(torch.tensor([[4.0, 2.0]])).sum(), tokens=1)
            given = run.clip_grad_norm_(list(model.parameters()), 1.0)
            assert (given is None) == (norm is None)
            sgd.step()
        assert float((model.weight - before).detach().norm()) <= 0.1 + 1e-6
        before = model.weight.detach().clone()


# Precision.


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_the_first_overflow_of_fp16_is_skipped_and_the_run_goes_on(optim, tmp_path):
    # lightly-train 255, litgpt 2042, accelerate 641: an error in clipping.
    class Steep(nn.Module):
        """A gradient of 8, past fp16 at the first scale of 65536."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.weight(x).mean()

    data = [{"x": torch.full((1,), 8.0)} for _ in range(24)]
    args = arguments(
        tmp_path, fp16=True, optim=optim, max_grad_norm=0.5, gradient_accumulation_steps=1
    )
    trainer = poise.Trainer(Steep(), args, train_dataset=data)
    output = trainer.train()
    status, scales = updates(trainer, "status"), updates(trainer, "loss_scale")
    skipped = output.metrics["skipped_updates"]
    assert 0 < skipped < 6 and status == ["overflow"] * skipped + ["applied"] * (12 - skipped)
    assert scales[skipped] == scales[0] / 2**skipped


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_came_in_16_bits_has_fp32_masters(dtype, tmp_path):
    # pytorch 74739 ("unscale FP16 gradients"), trl 6005 (no masters, unsaid).
    model = made("gpt2").to(dtype)
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    trainer = poise.Trainer(
        model, arguments(tmp_path, **{half: True}), train_dataset=causal_rows(16)
    )
    trainer.train()
    for name, _ in trainer.model.named_parameters():
        assert trainer.engine.master(name).dtype == torch.float32


def test_small_updates_of_16_bit_parameters_add_up_in_their_masters():
    # torchtune 2254: 1.0 - 0.001 is 1.0 in bf16, a hundred times.
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    settings = {
        "precision": {"dtype": "bf16", "parameters": "bf16"},
        "optimizer": {"type": "sgd", "lr": 1e-3, "max_grad_norm": 0.0},
    }
    engine = poise.Engine(model, settings)
    for _ in range(100):
        engine.step([torch.ones(1, 1)], lambda x: (model(x).sum(), 1))
    assert float(engine.master("weight")) == pytest.approx(0.9, abs=1e-5)
    assert float(model.weight.detach()) == pytest.approx(0.9, abs=2**-8)


def test_a_nan_is_seen_in_the_history(tmp_path):
    # trl 6702: filtered out of the log, while weights went on.
    class Spoiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Linear(1, 1)

        def forward(self, x):
            return self.weight(x).mean()

    data = [{"x": torch.full((1,), math.nan if i == 4 else 1.0)} for i in range(12)]
    args = arguments(
        tmp_path, on_nonfinite="skip", logging_steps=100, gradient_accumulation_steps=1
    )
    trainer = poise.Trainer(Spoiled(), args, train_dataset=data)
    trainer.train()
    bad = [line for line in trainer.state.log_history if line.get("status") == "nonfinite_loss"]
    assert [line["step"] for line in bad] == [3]


# Recomputation.


def test_a_router_decides_the_same_when_it_is_recomputed(tmp_path):
    # torchtitan 1117: ties in top-k.
    seen = []
    for recompute in (False, True):
        model = made("mixtral")
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.dim() == 2 and "experts" not in name:
                nn.init.zeros_(parameter)  # every expert ties with every other
        args = arguments(tmp_path, gradient_checkpointing=recompute)
        trainer = poise.Trainer(model, args, train_dataset=causal_rows(16))
        trainer.train()
        seen.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_what_recomputation_has_to_say_is_said_once(tmp_path, caplog, recwarn):
    # transformers 28536: at every step.
    args = arguments(
        tmp_path,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        gradient_accumulation_steps=1,
    )
    caplog.set_level("WARNING")
    poise.Trainer(made("llama"), args, train_dataset=causal_rows(16)).train()
    texts = [r.getMessage() for r in caplog.records] + [str(w.message) for w in recwarn]
    assert len(texts) == len(set(texts))


def test_offloaded_activations_with_frozen_layers_give_the_same_bits(tmp_path):
    # axolotl 2927.
    models = []
    for place in ("none", "host"):
        model = made("gpt2")
        model.transformer.wte.weight.requires_grad_(False)
        model.transformer.h[0].requires_grad_(False)
        args = arguments(tmp_path, offload_activations=place, gradient_checkpointing=True)
        poise.Trainer(model, args, train_dataset=causal_rows(16)).train()
        models.append(model)
    assert same_bits(*models)
