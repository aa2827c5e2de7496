"""poise.initialize: a DeepSpeed script and its JSON run, with the numbers of a float64 loop."""

import argparse
import json
import logging
import math
import sys

import poise
import pytest
import rank_processes
import torch
import torch.nn.functional as F
from poise.wrapped_model import WrappedModel
from torch import nn
from torch.utils.data import TensorDataset
from wrapped_loops import distance, network, plain, rows

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class WithLoss(nn.Module):
    """Returns the loss from forward, as DeepSpeed's models do."""

    def __init__(self, seed=0):
        super().__init__()
        self.body = network(seed)

    def forward(self, x, labels=None):
        return F.cross_entropy(self.body(x), labels)


def config(**more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": SGD,
        **more,
    }


def run(engine, batches):
    results = []
    for x, y in batches:
        loss = engine(x, labels=y)
        engine.backward(loss)
        results.append(engine.step())
    return results


def in_pieces(data, size):
    return [data[i : i + size] for i in range(0, len(data), size)]


# The calls.


def test_a_script_trains_as_big_batches_in_float64():
    data = rows(32)
    reference = network(dtype=torch.float64)
    make = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    norms = plain(reference, make, in_pieces(data, 8), max_norm=0.3)
    model = WithLoss()
    adam = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9], "torch_adam": True}
    engine, optimizer, loader, scheduler = poise.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config(optimizer={"type": "Adam", "params": adam}, gradient_clipping=0.3),
    )
    assert (loader, scheduler) == (None, None)
    results = run(engine, in_pieces(data, 2))
    assert [result is not None for result in results] == [False, False, False, True] * 4
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (4, 16, 0)
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-4)
    assert distance(model.body, reference) < 1e-6
    assert optimizer is engine.optimizer
    assert engine.get_batch_info() == (8, 2, 4)


def test_nothing_is_clipped_unless_the_file_says_so():
    engine, *_ = poise.initialize(model=WithLoss(), config=config())
    assert engine.gradient_clipping() == 0


def test_the_boundary_is_known_before_and_after_backward():
    data = rows(8)
    engine, *_ = poise.initialize(model=WithLoss(), config=config(gradient_accumulation_steps=2))
    seen = []
    for x, y in in_pieces(data, 2):
        loss = engine(x, labels=y)
        before = engine.is_gradient_accumulation_boundary()
        assert engine.backward(loss) is loss
        assert engine.is_gradient_accumulation_boundary() == before
        seen.append(before)
        engine.step()
    assert seen == [False, True, False, True]


@pytest.mark.parametrize("when", ["head", "after backward", "tail"])
def test_zero_grad_anywhere_in_the_loop_drops_nothing(when):
    data = rows(16)
    model, reference = WithLoss(), network(dtype=torch.float64)
    engine, *_ = poise.initialize(model=model, config=config())
    for x, y in in_pieces(data, 2):
        if when == "head":
            engine.zero_grad()
        engine.backward(engine(x, labels=y))
        if when == "after backward":
            engine.zero_grad()
        engine.step()
        if when == "tail":
            engine.zero_grad()
    assert (engine.global_steps, engine.micro_steps) == (2, 8)
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), in_pieces(data, 8))
    assert distance(model.body, reference) < 1e-6


def test_a_boundary_that_was_set_is_of_one_micro_batch_also_where_its_update_fails(monkeypatch):
    model = WithLoss()
    engine, *_ = poise.initialize(model=model, config=config())
    x, y = rows(2)[:]
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(x, labels=y))

    def fails(*_):
        raise poise.Error("no room")

    with monkeypatch.context() as broken:
        broken.setattr(WrappedModel, "step", fails)
        with pytest.raises(poise.Error, match="no room"):
            engine.step()
    assert not engine.is_gradient_accumulation_boundary()


def test_the_loaders_last_window_is_an_update_of_its_own(monkeypatch):
    data = rows(10)  # windows of 8 and 2; carried on, there would be 5 updates in 4 epochs
    monkeypatch.setattr("poise.deepspeed.start.RandomSampler", torch.utils.data.SequentialSampler)
    model, reference = WithLoss(), network(dtype=torch.float64)
    engine, _, loader, _ = poise.initialize(model=model, training_data=data, config=config())
    for _ in range(4):
        run(engine, loader)
    assert engine.global_steps == 8
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), in_pieces(data, 8) * 4)
    assert distance(model.body, reference) < 1e-6


def test_step_last_closes_a_window_of_ones_own_batches():
    data = rows(6)
    model, reference = WithLoss(), network(dtype=torch.float64)
    engine, *_ = poise.initialize(model=model, config=config())
    for i, (x, y) in enumerate(in_pieces(data, 2)):
        engine.backward(engine(x, labels=y))
        engine.step(last=i == 2)
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [data[:6]])
    assert distance(model.body, reference) < 1e-6


def test_a_step_for_a_micro_batch_that_failed_is_refused():
    data = rows(8)
    model, reference = WithLoss(), network(dtype=torch.float64)
    engine, *_ = poise.initialize(model=model, config=config())
    pieces = in_pieces(data, 2)
    run(engine, pieces[:3])
    with pytest.raises(RuntimeError, match="shapes"):
        engine.backward(engine(data[:2][0][:, :3], labels=data[:2][1]))
    # It counted as the window's fourth: an update came from three.
    with pytest.raises(poise.Error, match="3 of 4 micro-batches: leave step.. out"):
        engine.step()
    assert (engine.global_steps, engine.micro_steps) == (0, 3)
    run(engine, pieces[3:])
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [data[:8]])
    assert distance(model.body, reference) < 1e-6


def test_unequal_counts_weigh_as_their_tokens():
    x, y = rows(8)[:8]
    y = y.clone()
    y[:3] = -100
    model, reference = WithLoss(), network(dtype=torch.float64)
    engine, *_ = poise.initialize(model=model, config=config())
    run(engine, in_pieces(TensorDataset(x, y), 2))
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [(x, y)])
    assert distance(model.body, reference) < 1e-6


def test_set_train_batch_size_changes_the_accumulation():
    engine, *_ = poise.initialize(model=WithLoss(), config=config())
    engine.set_train_batch_size(4)
    assert engine.gradient_accumulation_steps() == 2 and engine.train_batch_size() == 4
    results = run(engine, in_pieces(rows(8), 2))
    assert [result is not None for result in results] == [False, True, False, True]
    with pytest.raises(poise.Error, match="multiples of 2"):
        engine.set_train_batch_size(5)


def test_no_sync_gives_the_same_sums_and_forbids_step():
    data = rows(8)
    model, reference = WithLoss(), network(dtype=torch.float64)
    engine, *_ = poise.initialize(model=model, config=config(zero_optimization={"stage": 2}))
    *first, (x, y) = in_pieces(data, 2)
    with engine.no_sync():
        for micro_batch in first:
            engine.backward(engine(micro_batch[0], labels=micro_batch[1]))
        with pytest.raises(poise.Error, match="no_sync"):
            engine.step()
    engine.backward(engine(x, labels=y))
    engine.step()
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [data[:8]])
    assert distance(model.body, reference) < 1e-6


def test_an_overflow_is_skipped_counted_and_not_scheduled():
    engine, _, _, scheduler = poise.initialize(
        model=WithLoss(),
        config=config(
            gradient_accumulation_steps=1,
            fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
            scheduler={"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.5}},
        ),
    )
    x, y = rows(2)[:2]
    assert engine.cur_scale == 16
    for factor in (1.0, math.inf):
        engine.backward(engine(x, labels=y) * factor)
        engine.step()
    assert engine.skipped_steps == 1 and not engine.was_step_applied()
    assert engine.global_steps == 2 and scheduler.last_batch_iteration == 0


def test_lines_are_printed_as_often_as_the_file_says(capsys):
    engine, *_ = poise.initialize(model=WithLoss(), config=config(steps_per_print=2))
    run(engine, in_pieces(rows(32), 2))
    assert capsys.readouterr().err.count("step=") == 2


def test_optimizer_and_scheduler_may_be_given_or_made():
    model = WithLoss()
    plain_config = {"train_batch_size": 2}
    engine, optimizer, _, scheduler = poise.initialize(
        model=model,
        config=plain_config,
        optimizer=lambda p: poise.ops.adam.DeepSpeedCPUAdam(p, lr=0.5),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )
    run(engine, [rows(2)[:2]])
    assert engine.get_lr() == [0.25]
    assert isinstance(optimizer, poise.ops.adam.FusedAdam)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    assert poise.initialize(model=model, optimizer=given, config=config())[1] is given


def test_coupled_decay_is_adams_own():
    data = rows(16)
    reference, model = network(dtype=torch.float64), WithLoss()
    adam = {"lr": 0.01, "weight_decay": 0.5}
    plain(reference, torch.optim.Adam(reference.parameters(), **adam), in_pieces(data, 8))
    params = {**adam, "adam_w_mode": False}
    engine, *_ = poise.initialize(
        model=model, config=config(optimizer={"type": "Adam", "params": params})
    )
    run(engine, in_pieces(data, 2))
    assert distance(model.body, reference) < 1e-6


def test_without_an_optimizer_there_is_one_and_it_is_said(caplog):
    with caplog.at_level(logging.WARNING, "poise"):
        engine, *_ = poise.initialize(model=WithLoss(), config={"train_batch_size": 2})
    assert "AdamW with a learning rate of 5e-05" in caplog.text
    assert engine.get_lr() == [5e-5]


def test_bf16_has_16_bit_parameters_and_fp32_masters():
    model = WithLoss()
    engine, *_ = poise.initialize(model=model, config=config(bf16={"enabled": True}))
    assert model.body[0].weight.dtype == torch.bfloat16
    assert engine.engine.master("body.0.weight").dtype == torch.float32
    assert engine.bfloat16_enabled() and not engine.fp16_enabled()
    run(engine, in_pieces(rows(8), 2))
    assert engine.was_step_applied()


def test_the_files_of_the_issue_runs_as_printed(tmp_path):
    text = """{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
        "allgather_partitions": true, "reduce_scatter": true}, "bf16": {"enabled": true}}"""
    (tmp_path / "ds.json").write_text(text)
    model = WithLoss()
    engine, *_ = poise.initialize(
        args=argparse.Namespace(deepspeed_config=str(tmp_path / "ds.json")),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )
    first, *_, last = (run(engine, [rows(6)[:6]])[0].loss for _ in range(20))
    assert last < first and engine.zero_optimization_stage() == 2
    assert engine.last_result.host_bytes > 0  # masters and moments are away from the device


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_states_change_no_bit(device, tmp_path):
    seen = []
    for where in ("none", device):
        offload = {"device": where, "nvme_path": str(tmp_path)}
        zero = {"stage": 2, "offload_optimizer": offload}
        model = WithLoss()
        engine, *_ = poise.initialize(
            model=model,
            config=config(
                optimizer={"type": "AdamW", "params": {"lr": 0.01}},
                zero_optimization=zero,
                gradient_clipping=0.5,
            ),
        )
        run(engine, in_pieces(rows(32), 2))
        seen.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_the_model_goes_to_a_file_and_back(tmp_path, monkeypatch):
    engine, *_ = poise.initialize(model=WithLoss(), config=config(bf16={"enabled": True}))
    devices, whole = [], engine.engine.state_dict
    monkeypatch.setattr(
        engine.engine,
        "state_dict",
        lambda rank, device: devices.append(device) or whole(rank, device),
    )
    engine.save_16bit_model(tmp_path / "out")
    assert devices == ["cpu"]  # a file opens where there is no GPU
    state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert state["body.0.weight"].dtype == torch.bfloat16
    other, *_ = poise.initialize(model=WithLoss(seed=3), config=config(bf16={"enabled": True}))
    other.load_module_state_dict(state)
    assert torch.equal(other.module.body[0].weight, engine.module.body[0].weight)
    with pytest.raises(poise.Error, match="no name of a file"):
        engine.save_16bit_model(tmp_path, "../x")


def resumable(folder=None):
    adam = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
    schedule = {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 2, "total_num_steps": 6},
    }
    engine, *_ = poise.initialize(
        model=WithLoss(), config=config(optimizer=adam, scheduler=schedule)
    )
    return engine


def test_a_checkpoint_goes_on_as_if_nothing_had_been(tmp_path):
    data = in_pieces(rows(48), 2)
    whole = resumable()
    run(whole, data)
    first = resumable()
    run(first, data[:12])
    client_state = {"epoch": 3, "seen": {0: [1.5], 4: {}}}
    assert first.save_checkpoint(tmp_path, client_state=client_state)
    run(first, data[12:16])
    first.save_checkpoint(tmp_path, tag="mine")
    second = resumable()
    path, client = second.load_checkpoint(tmp_path, tag="global_step3")
    assert path == str(tmp_path / "global_step3") and client == client_state
    assert (second.global_steps, second.micro_steps, second.get_lr()) == (3, 12, [0.02])
    run(second, data[12:])
    for p, q in zip(second.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(p, q)
    third = resumable()
    assert third.load_checkpoint(tmp_path)[0] == str(tmp_path / "mine")  # the latest
    run(third, data[16:])
    for p, q in zip(third.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(p, q)


def test_parameters_alone_and_no_save_at_all(tmp_path, caplog):
    engine = resumable()
    with caplog.at_level(logging.WARNING, "poise"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "no save in" in caplog.text
    run(engine, in_pieces(rows(8), 2))
    engine.save_checkpoint(tmp_path)
    other = resumable()
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert other.global_steps == 0 and other.engine.updates == 0
    for p, q in zip(other.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(poise.Error, match="client_state cannot be saved as JSON"):
        engine.save_checkpoint(tmp_path, client_state={"model": engine.module})
    with pytest.raises(poise.Error, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)


def test_gathered_parameters_find_their_engine():
    model = WithLoss()
    with poise.zero.Init(dtype=torch.bfloat16):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    with poise.zero.GatheredParameters(model.parameters()):  # no engine yet
        pass
    engine, *_ = poise.initialize(model=model, config=config())
    with poise.zero.GatheredParameters(model.body[0].weight, modifier_rank=0):
        with torch.no_grad():
            model.body[0].weight.fill_(0.5)
    assert engine.engine.master("body.0.weight").eq(0.5).all()


def test_a_script_asks_where_it_is():
    accelerator = poise.accelerator.get_accelerator()
    assert accelerator.current_device_name() == accelerator.device_name() == "cpu"
    assert (accelerator.device_count(), accelerator.communication_backend_name()) == (1, "gloo")
    accelerator.set_device(0)
    assert (poise.comm.get_rank(), poise.comm.get_world_size(), poise.comm.get_local_rank()) == (
        0,
        1,
        0,
    )
    assert not poise.comm.is_initialized()
    poise.comm.barrier()


def test_the_command_line_has_deepspeeds_options():
    parser = argparse.ArgumentParser()
    args = poise.add_config_arguments(parser).parse_args(
        ["--deepspeed", "--deepspeed_config", "ds.json", "--local_rank", "1"]
    )
    assert (args.deepspeed, args.deepspeed_config, args.local_rank) == (True, "ds.json", 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert poise.add_config_arguments(parser).parse_args([]).local_rank == -1


SCRIPT = """\
import argparse
import json
import sys

import torch

import {package}

sys.path.insert(0, {tests!r})
from test_deepspeed import WithLoss
from wrapped_loops import rows

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
assert deepspeed.comm.get_world_size() == {size}
deepspeed.comm.barrier()
model = WithLoss()
engine, optimizer, _, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters()
)
data = rows(32)
for step in range(16 // engine.world_size):
    at = (step * engine.world_size + engine.global_rank) * 2
    x, y = data[at : at + 2]
    loss = engine(x.to(engine.device), labels=y.to(engine.device))
    engine.backward(loss)
    engine.step()
state = engine.module_state_dict()
if engine.global_rank == 0:
    print(json.dumps({{name: value.tolist() for name, value in state.items()}}))
"""


@pytest.mark.parametrize(("size", "stage"), [(1, 2), (2, 1), (2, 2), (2, 3)])
def test_a_script_runs_on_ranks_with_another_import_alone(size, stage, tmp_path):
    script, settings = tmp_path / "script.py", tmp_path / "ds.json"
    tests = str(rank_processes.FOLDER)
    script.write_text(SCRIPT.format(package="poise as deepspeed", tests=tests, size=size))
    settings.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 5e8},
            }
        )
    )
    command = [sys.executable, str(script), "--deepspeed", "--deepspeed_config", str(settings)]
    outputs = rank_processes.finish(rank_processes.start(command, size))
    state = {k: torch.tensor(v) for k, v in json.loads(outputs[0].strip().splitlines()[-1]).items()}
    reference, model = network(dtype=torch.float64), WithLoss()
    adam = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1)
    plain(reference, adam, in_pieces(rows(32), 8))
    model.load_state_dict(state)
    assert distance(model.body, reference) < 1e-6


def test_what_initialize_cannot_keep_is_an_error():
    with pytest.raises(poise.Error, match="poise has kernels for Adam"):
        poise.initialize(model=WithLoss(), config=config(optimizer={"type": "OneBitAdam"}))
    for params, message in (
        ({"lr": "auto"}, "which a Trainer fills in"),
        ({"amsgrad": True}, "no kernel"),
        ({"max_grad_norm": 1.0}, "say gradient_clipping"),
    ):
        adam = {"type": "Adam", "params": params}
        with pytest.raises(poise.Error, match=message):
            poise.initialize(model=WithLoss(), config=config(optimizer=adam))
    for path, open_one in (
        ("bf16.enabled", {"bf16": {"enabled": "auto"}}),
        ("gradient_clipping", {"gradient_clipping": "auto"}),
        ("zero_optimization.stage", {"zero_optimization": {"stage": "auto"}}),
    ):
        with pytest.raises(poise.Error, match=f'{path} is "auto", which a Trainer fills in'):
            poise.initialize(model=WithLoss(), config=config(**open_one))
    with pytest.raises(poise.Error, match="no settings"):
        poise.initialize(model=WithLoss())
    with pytest.raises(poise.Error, match="do not fit WarmupLR"):
        bad = {"type": "WarmupLR", "params": {"total": 1}}
        poise.initialize(model=WithLoss(), config=config(scheduler=bad))
    with pytest.raises(poise.Error, match="scheduler.type is 'Sawtooth'"):
        poise.initialize(model=WithLoss(), config=config(scheduler={"type": "Sawtooth"}))
    with pytest.raises(poise.Error, match="no train_micro_batch_size"):
        poise.initialize(model=WithLoss(), training_data=rows(4), config={"optimizer": SGD})
    engine, *_ = poise.initialize(model=WithLoss(), config=config())
    with pytest.raises(poise.Error, match="scale_wrt_gas"):
        engine.backward(engine(rows(2)[:2][0], labels=rows(2)[:2][1]), scale_wrt_gas=False)
