"""What scripts import from DeepSpeed is in poise.deepspeed by the same name, and does what it does there."""

import importlib
import importlib.util
import json
import logging
import sys

import poise
import poise.deepspeed as deepspeed
import pytest
import rank_processes
import torch
from test_deepspeed import SGD, WithLoss, config, in_pieces
from torch.utils.data import DistributedSampler
from wrapped_loops import distance, network, plain, rows

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {
    "": "initialize init_distributed add_config_arguments DeepSpeedEngine get_accelerator log_dist logger zero "
    "comm ops checkpointing __version__",
    ".accelerator": "get_accelerator",
    ".checkpointing": "checkpoint configure is_configured reset",
    ".comm": "init_distributed is_initialized get_rank get_world_size get_local_rank get_world_group barrier "
    "all_reduce broadcast all_gather reduce_scatter new_group ReduceOp",
    ".monitor.config": "get_monitor_config DeepSpeedMonitorConfig TensorBoardConfig WandbConfig CSVConfig",
    ".monitor.csv_monitor": "csvMonitor",
    ".monitor.monitor": "MonitorMaster",
    ".monitor.tensorboard": "TensorBoardMonitor",
    ".monitor.wandb": "WandbMonitor",
    ".ops.adam": "FusedAdam DeepSpeedCPUAdam",
    ".ops.lamb": "FusedLamb",
    ".ops.lion": "FusedLion DeepSpeedCPULion",
    ".runtime.config": "DeepSpeedConfig",
    ".runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    ".utils": "logger log_dist RepeatingLoader safe_get_full_fp32_param safe_get_full_grad "
    "safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state",
    ".utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
    "convert_zero_checkpoint_to_fp32_state_dict",
    ".zero": "Init GatheredParameters",
}


def of(module):
    # `deepspeed.zero` and `deepspeed.checkpointing` are names of DeepSpeed, not modules of that path.
    parent, _, last = module.rpartition(".")
    found = importlib.util.find_spec(module) if parent else True
    return importlib.import_module(module) if found else getattr(of(parent), last)


@pytest.mark.parametrize("module", NAMES)
@pytest.mark.parametrize("package", ["poise.deepspeed", "deepspeed"])
def test_names_are_there(package, module):
    if importlib.util.find_spec(package) is None:
        pytest.skip("DeepSpeed is not installed")
    missing = [name for name in NAMES[module].split() if not hasattr(of(package + module), name)]
    assert missing == []


def test_what_is_not_there_says_why():
    with pytest.raises(AttributeError, match="has no PipelineModule: there are no pipeline stages"):
        _ = deepspeed.PipelineModule
    with pytest.raises(AttributeError, match=r"has no no_such_name; docs/deepspeed\.md"):
        _ = deepspeed.no_such_name
    with pytest.raises(AttributeError, match=r"no no_such_name, nor has torch\.distributed"):
        _ = deepspeed.comm.no_such_name


@pytest.mark.parametrize(
    ("made", "reference"),
    [
        (deepspeed.ops.lamb.FusedLamb, lambda p: poise.optimizers.Lamb(p, 1e-2, eps=1e-8, min_coeff=0.01, max_coeff=10)),
        (deepspeed.ops.lion.FusedLion, lambda p: poise.optimizers.Lion(p, 1e-2, (0.9, 0.999))),
        (deepspeed.ops.lion.DeepSpeedCPULion, lambda p: poise.optimizers.Lion(p, 1e-2, (0.9, 0.999))),
    ],
)  # fmt: skip
def test_optimizers_by_name_train_with_deepspeeds_values(made, reference):
    data, exact, model = rows(16), network(dtype=torch.float64), WithLoss()
    plain(exact, reference(exact.parameters()), in_pieces(data, 8))
    optimizer = made(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config())
    for x, y in in_pieces(data, 2):
        engine.backward(engine.forward(x, labels=y))
        engine.step()
    assert distance(model.body, exact) < 1e-6


def test_optimizers_refuse_what_has_no_kernel():
    weights = [torch.nn.Parameter(torch.zeros(2))]
    for options, message in (
        ({"bias_correction": False}, "moments are corrected"),
        ({"max_grad_norm": 1.0}, "say gradient_clipping"),
    ):
        with pytest.raises(poise.Error, match=message):
            deepspeed.ops.lamb.FusedLamb(weights, **options)
    with pytest.raises(poise.Error, match="moments are fp32"):
        deepspeed.ops.lion.DeepSpeedCPULion(weights, fp32_optimizer_states=False)


def test_the_loss_scale_that_was_set():
    for fp16, scale, dynamic in (({"loss_scale": 128}, 128, False), ({"loss_scale": 0}, 0, True)):
        engine, *_ = deepspeed.initialize(
            model=WithLoss(), config=config(fp16={"enabled": True, **fp16}, steps_per_print=7)
        )
        assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (scale, dynamic)
        assert engine.steps_per_print() == 7
    engine, *_ = deepspeed.initialize(model=WithLoss(), config=config())
    assert not engine.dynamic_loss_scale()


def test_a_repeating_loader_begins_again():
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_the_logger_is_deepspeeds(caplog):
    assert deepspeed.logger is logging.getLogger("DeepSpeed")
    deepspeed.logger.addHandler(caplog.handler)
    try:
        deepspeed.log_dist("hello", ranks=[0], level=logging.WARNING)
    finally:
        deepspeed.logger.removeHandler(caplog.handler)
    assert caplog.messages == ["[Rank 0] hello"]


# As DeepSpeed's CIFAR-10 example goes: the loss is made outside of the model, batches come from
# initialize's loader, and torch.distributed is asked on one rank too.
SCRIPT = """\
import argparse
import json
import os
import sys

import poise.deepspeed as deepspeed
import torch
from poise.deepspeed.accelerator import get_accelerator

sys.path.insert(0, {tests!r})
from test_deepspeed import SGD
from wrapped_loops import network, rows

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args()
deepspeed.init_distributed()
# Not as the last thing: torch's own thread would let go of the tensor while the interpreter ends, and abort.
deepspeed.comm.all_reduce(torch.ones(1))
get_accelerator().set_device(int(os.environ.get("LOCAL_RANK")))
if torch.distributed.get_rank() != 0:
    torch.distributed.barrier()
data = rows(32)
if torch.distributed.get_rank() == 0:
    torch.distributed.barrier()
net = network()
parameters = filter(lambda p: p.requires_grad, net.parameters())
config = {{"train_batch_size": 8, "optimizer": SGD, "fp16": {{"enabled": False}},
           "zero_optimization": {{"stage": 1, "cpu_offload": False}}}}
engine, optimizer, loader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=data, config=config
)
device = get_accelerator().device_name(engine.local_rank)
criterion = torch.nn.CrossEntropyLoss()
for _ in range(2):
    for inputs, labels in loader:
        loss = criterion(engine(inputs.to(device)), labels.to(device))
        engine.backward(loss)
        engine.step()
state = engine.module_state_dict()
if engine.global_rank == 0:
    print(json.dumps({{name: value.tolist() for name, value in state.items()}}))
"""


@pytest.mark.parametrize("size", [1, 2])
def test_the_cifar_example_on_one_rank_and_on_two(size, tmp_path):
    script, data = tmp_path / "script.py", rows(32)
    script.write_text(SCRIPT.format(tests=str(rank_processes.FOLDER)))
    outputs = rank_processes.finish(rank_processes.start([sys.executable, str(script)], size))
    state = json.loads(outputs[0].strip().splitlines()[-1])
    exact, trained = network(dtype=torch.float64), network()
    trained.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    orders = [list(DistributedSampler(data, size, rank)) for rank in range(size)]
    part = 8 // size
    chosen = [[i for o in orders for i in o[at : at + part]] for at in range(0, 32 // size, part)]
    windows = [data[indices] for indices in chosen] * 2
    plain(exact, torch.optim.SGD(exact.parameters(), lr=SGD["params"]["lr"]), windows)
    assert distance(trained, exact) < 1e-6
