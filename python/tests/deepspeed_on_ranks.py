"""One rank of test_deepspeed_values.py: `deepspeed_on_ranks.py CASE FOLDER`, started by rank_processes."""

from __future__ import annotations

import sys

import poise
import poise.deepspeed as deepspeed
import rank_processes
import torch
import torch.nn.functional as F
from poise.deepspeed import comm, utils
from test_deepspeed import WithLoss, config, in_pieces
from wrapped_loops import network, plain, rows

ADAM = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}}
SIZE = 4  # of a micro-batch; two on each rank make a window


def engine_of_stage(stage, **more):
    settings = config(
        train_micro_batch_size_per_gpu=SIZE,
        gradient_accumulation_steps=2,
        optimizer=ADAM,
        zero_optimization={"stage": stage},
        **more,
    )
    engine, *_ = deepspeed.initialize(model=WithLoss(), config=settings)
    return engine


def share(engine, update=0):
    """This rank's micro-batches of an update."""
    window = 2 * SIZE * engine.world_size
    pieces = in_pieces(rows(2 * window), SIZE)
    first = update * window // SIZE
    return pieces[first : first + window // SIZE][engine.global_rank :: engine.world_size]


def reference(updates, size, change=None):
    """The same in float64 by torch: the model, its optimizer, the last gradients."""
    model = network(dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    window = 2 * SIZE * size
    for update in range(updates):
        x, y = rows(2 * window)[update * window : (update + 1) * window]
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        if change is not None:
            change(model, optimizer)
            change = None
    return model, optimizer


def far(a, b):
    """Largest difference, relative to the largest number."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max())


def half_and_third(model, optimizer):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
            optimizer.state[parameter]["exp_avg"].div_(3)


def values(stage):
    """How far each of the functions is from torch in float64."""
    engine = engine_of_stage(stage)
    size, found = engine.world_size, {}
    for number, (x, y) in enumerate(share(engine)):
        if number == 1:
            try:
                utils.safe_get_full_grad(engine.module.body[0].weight)
            except poise.Error as error:
                found["early"] = str(error)
        engine(x, labels=y).backward()
        if number == 1:
            grads = [utils.safe_get_full_grad(p) for p in engine.module.parameters()]
        engine.step()
    model, optimizer = reference(1, size)
    trained = list(zip(engine.module.parameters(), model.parameters(), grads, strict=True))
    found["grad"] = max(far(g, q.grad) for _, q, g in trained)
    found["value"] = max(far(utils.safe_get_full_fp32_param(p), q) for p, q, _ in trained)
    for key in ("exp_avg", "exp_avg_sq"):
        moments = (
            (utils.safe_get_full_optimizer_state(p, key), optimizer.state[q]) for p, q, _ in trained
        )
        found[key] = max(far(moment, state[key]) for moment, state in moments)
    for p, _, _ in trained:
        utils.safe_set_full_fp32_param(p, utils.safe_get_full_fp32_param(p) * 0.5)
        third = utils.safe_get_full_optimizer_state(p, "exp_avg") / 3
        utils.safe_set_full_optimizer_state(p, third, "exp_avg")
    for x, y in share(engine, 1):
        engine.backward(engine(x, labels=y))
        engine.step()
    model, _ = reference(2, size, half_and_third)
    state = {n: v.double() for n, v in engine.module_state_dict().items()}
    found["after"] = max(far(state[f"body.{n}"], v) for n, v in model.state_dict().items())
    return found


def written_gradients(stage):
    """What is written into a gradient is what the update takes: zeros leave Adam at its start."""
    engine = engine_of_stage(stage)
    before = engine.module_state_dict()
    for x, y in share(engine):
        engine.backward(engine(x, labels=y))
        if engine.is_gradient_accumulation_boundary():
            for p in engine.module.parameters():
                utils.safe_set_full_grad(p, torch.zeros_like(utils.safe_get_full_grad(p)))
        engine.step()
    after = engine.module_state_dict()
    return all(torch.equal(before[name], value) for name, value in after.items())


def plain_backward(stage):
    """How far a script that computes its loss itself, and calls backward() of it, is from torch in float64."""
    settings = config(
        train_micro_batch_size_per_gpu=SIZE,
        gradient_accumulation_steps=2,
        optimizer=ADAM,
        zero_optimization={"stage": stage},
    )
    engine, *_ = deepspeed.initialize(model=network(), config=settings)
    for update in range(2):
        for x, y in share(engine, update):
            F.cross_entropy(engine(x), y).backward()
            engine.step()
    model, _ = reference(2, engine.world_size)
    state = {n: v.double() for n, v in engine.module_state_dict().items()}
    return max(far(state[n], v) for n, v in model.state_dict().items())


def asked(stage, folder):
    """What scripts read of an engine and do with it between its updates."""
    engine = engine_of_stage(stage, gradient_clipping=1.0)
    found = [
        engine.zero_optimization_stage() == stage,
        engine.get_batch_info() == (4 * SIZE, SIZE, 2),
        (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (4 * SIZE, SIZE),
        (engine.global_rank, engine.local_rank) == (engine.engine.group.rank,) * 2,
        (engine.world_size, engine.dp_world_size) == (2, 2),
        engine.device == torch.device("cpu"),
        (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, False),
        engine.train().module.training and not engine.eval().module.training,
    ]
    weight = engine.train().module.body[0].weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(0.25 if engine.global_rank == 0 else 9.0)
    found.append(bool((utils.safe_get_full_fp32_param(weight) == 0.25).all()))
    [first, second] = share(engine)
    with engine.no_sync():
        engine.backward(engine(first[0], labels=first[1]))
    engine.backward(engine(second[0], labels=second[1]))
    engine.step()
    found.append((engine.global_steps, engine.global_samples) == (1, 4 * SIZE))
    found.append(engine.was_step_applied() and engine.get_global_grad_norm() > 0)
    engine.zero_grad()
    engine.empty_partition_cache()
    engine.save_16bit_model(folder / f"of_stage{stage}")
    written = torch.load(folder / f"of_stage{stage}" / "pytorch_model.bin")
    state = engine.module_state_dict()
    found.append(all(torch.equal(value, written[name]) for name, value in state.items()))
    engine.destroy()
    left = engine.module.state_dict()
    found.append(all(torch.equal(value, left[name]) for name, value in state.items()))
    return found


def frozen(folder):
    """How far a loop that freezes and frees is from torch in float64; what ranks that differ are told."""
    plan, distances = {1: ("0", False), 3: ("0", True), 4: ("2", False), 5: ("2", True)}, []
    size = comm.get_world_size()
    batches = in_pieces(rows(6 * SIZE * size), SIZE * size)
    reference = network(dtype=torch.float64)
    made = torch.optim.AdamW(reference.parameters(), lr=0.05, weight_decay=0.1)

    def change(model, update):
        name, trained = plan.get(update, ("0", None))
        if trained is not None:
            model.get_submodule(name).requires_grad_(trained)

    for update, batch in enumerate(batches):
        change(reference, update)
        plain(reference, made, [batch])
    for stage in range(4):
        engine, *_ = deepspeed.initialize(
            model=network(),
            config={
                "train_micro_batch_size_per_gpu": SIZE,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
                "zero_optimization": {"stage": stage},
            },
        )
        for update, (x, y) in enumerate(batches):
            change(engine.module, update)
            mine = slice(engine.global_rank * SIZE, (engine.global_rank + 1) * SIZE)
            engine.backward(F.cross_entropy(engine(x[mine]), y[mine]))
            engine.step()
        state = {n: v.double() for n, v in engine.module_state_dict().items()}
        distances.append(max(far(state[n], v) for n, v in reference.state_dict().items()))
    engine.module[0].requires_grad_(engine.global_rank == 0)
    try:
        x, y = batches[0]
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
    except poise.Error as error:
        return {"distances": distances, "mismatch": str(error)}
    return {"distances": distances, "mismatch": "no error"}


def all_stages(folder):
    return {
        "asked": [asked(stage, folder) for stage in range(4)],
        "values": [values(stage) for stage in range(4)],
        "written": [written_gradients(stage) for stage in range(4)],
        "plain": [plain_backward(stage) for stage in range(4)],
        "saved": saved(folder),
    }


def saved(folder):
    engine = engine_of_stage(3, bf16={"enabled": True})
    for x, y in share(engine):
        engine.backward(engine(x, labels=y))
        engine.step()
    engine.save_checkpoint(folder / "save")
    named = engine.module.named_parameters()
    return {n: utils.safe_get_full_fp32_param(p).tolist() for n, p in named}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.argv[1:] = sys.argv[1:3]
    rank_processes.main({"all_stages": all_stages, "frozen": frozen})
