"""poise.deepspeed: loss.backward(), whole values of parameters, gradients and moments, fp32 models of saves."""

import gc
import subprocess
import sys
import types
import weakref

import deepspeed_on_ranks
import poise
import poise.deepspeed as deepspeed
import pytest
import rank_processes
import torch
from deepspeed_on_ranks import engine_of_stage, plain_backward, share, values, written_gradients
from poise.deepspeed import utils
from poise.deepspeed.utils import zero_to_fp32
from safetensors.torch import load_file
from test_deepspeed import WithLoss, config, in_pieces, run
from tiny_models import same_bits
from torch import nn
from wrapped_loops import rows

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return rank_processes.run("deepspeed_on_ranks.py", "all_stages", folder), folder


# loss.backward()


class Wrapped(WithLoss):
    """Its loss comes in another form."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x, labels=None):
        return self.form(super().forward(x, labels))


FORMS = {
    "loss": (lambda loss: loss, lambda out: out),
    "output": (lambda loss: types.SimpleNamespace(loss=loss), lambda out: out.loss),
    "dictionary": (lambda loss: {"loss": loss, "logits": loss * 2}, lambda out: out["loss"]),
    "tuple": (lambda loss: (loss, loss * 2), lambda out: out[0]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fp16", [False, True])
def test_a_loss_of_the_engine_says_backward_itself(form, fp16):
    make, loss_of = FORMS[form]
    settings = config(fp16={"enabled": fp16, "loss_scale": 128})
    plain, *_ = poise.initialize(model=WithLoss(), config=settings)
    run(plain, in_pieces(rows(16), 2))
    engine, *_ = poise.initialize(model=Wrapped(make), config=settings)
    for x, y in in_pieces(rows(16), 2):
        loss = engine.scale(loss_of(engine(x, labels=y)))
        assert loss.backward() is None
        engine.step()
    assert engine.global_steps == 2
    assert same_bits(engine.module.body, plain.module.body)


def test_it_keeps_no_loss_alive():
    engine, *_ = poise.initialize(model=WithLoss(), config=config())
    x, y = rows(2)[:]
    gc.disable()
    try:
        for goes_back in (False, True):
            loss = engine(x, labels=y)
            if goes_back:
                loss.backward()
            seen = weakref.ref(loss)
            del loss
            assert seen() is None
    finally:
        gc.enable()


# Whole values.


def check(found):
    assert "this window holds 1 of 2 micro-batches" in found.pop("early")
    assert max(found.values()) < 2e-6, found


def test_values_on_one_rank():
    check(values(0))
    assert written_gradients(0)


@pytest.mark.parametrize("stage", range(4))
def test_values_on_two_ranks(ranks, stage):
    for rank in ranks[0]:
        check(rank["values"][stage])
        assert rank["written"][stage]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_16_bit_parameter_has_its_master_set_to_the_bit(stage):
    engine = engine_of_stage(stage, bf16={"enabled": True})
    weight = engine.module.body[0].weight
    value = torch.rand_like(weight, dtype=torch.float32)
    utils.safe_set_full_fp32_param(weight, value)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), value)
    assert torch.equal(weight, value.bfloat16())
    for x, y in share(engine):  # as an edit it would be taken over again, rounded
        engine.backward(engine(x, labels=y) * 0)
        engine.step()
    assert torch.equal(utils.safe_get_full_fp32_param(weight), value)


def test_what_is_not_there_is_an_error():
    engine = engine_of_stage(0)
    weight = engine.module.body[0].weight
    with pytest.raises(
        poise.Error, match="adamw keeps no 'momentum_buffer': its moments are exp_avg"
    ):
        utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
    with pytest.raises(poise.Error, match="is no parameter of an engine"):
        utils.safe_get_full_fp32_param(torch.ones(2))
    with pytest.raises(poise.Error, match=r"set_master\('body.0.weight'\) got a tensor of shape"):
        utils.safe_set_full_fp32_param(weight, torch.ones(3))
    with pytest.raises(AttributeError, match="safe_get_full_grad has the whole"):
        _ = utils.safe_get_local_grad
    engine.backward(engine(*share(engine)[0][:1], labels=share(engine)[0][1]))
    with pytest.raises(poise.Error, match=r"set_master\(\) came in an open window"):
        utils.safe_set_full_fp32_param(weight, weight.detach())
    plain = poise.Engine(WithLoss(), {})
    with pytest.raises(poise.Error, match=r"none of deepspeed\.initialize"):
        utils.safe_get_full_grad(plain.model.body[0].weight)


def test_a_loss_of_the_script_is_the_engines_at_every_stage(ranks):
    for distance in [plain_backward(0), *ranks[0][0]["plain"], *ranks[0][1]["plain"]]:
        assert distance < 2e-6


# zero_to_fp32


def test_a_save_of_two_ranks_is_one_fp32_state_dict(ranks, tmp_path):
    found, folder = ranks
    want = {name: torch.tensor(value) for name, value in found[0]["saved"].items()}
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder / "save")
    assert state.keys() == want.keys()
    assert all(v.dtype == torch.float32 and torch.equal(v, want[n]) for n, v in state.items())
    assert any(not torch.equal(v, v.bfloat16().float()) for v in state.values())
    with_tag = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        folder / "save", "global_step1"
    )
    assert all(torch.equal(v, want[n]) for n, v in with_tag.items())
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(WithLoss(seed=5), folder / "save")
    assert all(torch.equal(v, want[n]) for n, v in model.state_dict().items())
    convert = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(folder / "save", tmp_path / "a")
    convert(str(folder / "save"), str(tmp_path / "b"), safe_serialization=True)
    convert(folder / "save", tmp_path / "c" / "model.bin")  # as in older versions
    command = [
        sys.executable,
        "-m",
        "poise.deepspeed.utils.zero_to_fp32",
        folder / "save",
        tmp_path / "d",
    ]
    subprocess.run(list(map(str, command)), check=True, timeout=200)
    for written in (
        torch.load(tmp_path / "a" / "pytorch_model.bin"),
        load_file(tmp_path / "b" / "model.safetensors"),
        torch.load(tmp_path / "c" / "model.bin"),
        torch.load(tmp_path / "d" / "pytorch_model.bin"),
    ):
        assert all(torch.equal(v, want[n]) for n, v in written.items()) and len(written) == len(
            want
        )


class Tied(nn.Module):
    """Two names of one weight, a frozen layer, a buffer of 16 bits and one of integers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("short", torch.full((), 1.5, dtype=torch.float16))
        self.register_buffer("whole", torch.tensor([3, 4]))

    def forward(self, x, labels=None):
        return nn.functional.cross_entropy(self.frozen(self.second(self.first(x))), labels)


def test_ties_frozen_parameters_and_buffers(tmp_path):
    engine, *_ = poise.initialize(model=Tied(), config=config(gradient_accumulation_steps=1))
    run(engine, in_pieces(rows(2), 2))
    engine.save_checkpoint(tmp_path)
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    want = engine.module_state_dict()
    assert state.keys() == want.keys()
    assert all(torch.equal(value, want[name].to(value.dtype)) for name, value in state.items())
    assert state["first.weight"] is state["second.weight"]
    assert (state["short"].dtype, state["whole"].dtype) == (torch.float32, torch.int64)
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path, exclude_frozen_parameters=True
    )
    assert {*state} - {*trained} == {"frozen.weight", "frozen.bias"}
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, tmp_path)
    assert (
        model is engine.module
        and deepspeed_on_ranks.poise.engine.engine_of(model.first.weight) is None
    )
    with pytest.raises(poise.Error, match="there is no whole save in .*none"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "none")


# What scripts ask an engine for.


def test_an_engine_has_what_scripts_read():
    engine = engine_of_stage(2, gradient_clipping=1.0, bf16={"enabled": True})
    run(engine, share(engine))
    assert engine.train().module.training and not engine.eval().module.training
    assert (engine.local_rank, engine.global_rank, engine.world_size) == (0, 0, 1)
    assert engine.device == torch.device("cpu") == next(engine.parameters()).device
    assert engine.optimizer.param_groups[0]["lr"] == engine.get_lr()[0] == 0.05
    assert engine.lr_scheduler is None
    assert engine.get_batch_info() == (8, 4, 2)
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 2
    assert engine.zero_optimization_stage() == 2
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)
    assert engine.gradient_clipping() == 1.0
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (1, 8, 0)
    engine.zero_grad()
    engine.empty_partition_cache()
    with engine.no_sync():
        pass
    with pytest.raises(AttributeError, match="no eval_batch: there are no pipeline stages"):
        engine.eval_batch(iter([]))
    with pytest.raises(AttributeError, match="no train_batch: there are no pipeline stages"):
        engine.train_batch()
    assert not engine.monitor.enabled
    with deepspeed.zero.GatheredParameters(engine.module.body[0].weight):
        assert engine.module.body[0].weight.numel() > 0
    engine.destroy()
    assert engine.module.body[0].weight.isfinite().all()


@pytest.mark.parametrize("stage", range(4))
def test_so_it_has_at_every_stage(ranks, stage):
    assert [rank["asked"][stage] for rank in ranks[0]] == [[True] * 13] * 2
