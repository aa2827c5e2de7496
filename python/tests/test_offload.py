"""Offloaded states from Python: the same bits as on the device, in less of its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import poise
import pytest
import torch
from poise import Error, cli


class Stack(torch.nn.Module):
    """Layers whose states are far larger than what backward keeps."""

    def __init__(self, layers: int = 6, width: int = 128) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.1, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


HALF = {"precision": {"dtype": "bf16", "parameters": "bf16"}}
BUDGET = 8  # bytes for each parameter: values take 2, gradients 4, masters and moments 12 more


def window(update: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(update)
    return [(torch.randn(n, 128, generator=generator), n) for n in (4, 2, 3)]


def train(config: dict, updates: int = 4) -> tuple[list, torch.nn.Module, poise.Engine]:
    model = Stack()
    engine = poise.Engine(model, config)

    def loss_fn(batch: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
        x, count = batch
        return torch.nn.functional.mse_loss(model(x.to(torch.bfloat16)).float(), x), count

    return [engine.step(window(update), loss_fn) for update in range(updates)], model, engine


def to_file(folder) -> dict:
    return {
        "optimizer": "file",
        "directory": str(folder),
        "block_bytes": 4096,
        "staging_bytes": "64KiB",
        "queue_depth": 4,
    }


@pytest.mark.parametrize("where", ["host", "file"])
def test_states_that_do_not_fit_the_budget_train_inside_it(where, tmp_path):
    results, model, engine = train(HALF)
    numel = sum(p.numel() for p in model.parameters())
    budget = BUDGET * numel
    assert results[-1].peak_bytes > 2 * budget
    with pytest.raises(torch.OutOfMemoryError):
        train({**HALF, "memory": {"budget_bytes": budget}})
    offload = {"optimizer": "host"} if where == "host" else to_file(tmp_path)
    got, other, offloaded = train({**HALF, "memory": {"budget_bytes": budget}, "offload": offload})
    assert [r.loss for r in got] == [r.loss for r in results]
    assert all(r.peak_bytes <= budget for r in got)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(engine.master(name), offloaded.master(name)), name
    states = 12 * numel
    held = got[-1].host_bytes if where == "host" else got[-1].file_bytes
    assert states <= held <= 1.2 * states, "padding and whole pages"
    assert os.listdir(tmp_path) == [], "the file has no name"


EVERYTHING = {
    "optimizer": "host",
    "gradients": "host",
    "parameters": "host",
    "activations": "host",
    "activation_min_bytes": 1,
}
KINDS = ["optimizer", "gradients", "parameters", "activations"]


@pytest.mark.parametrize("away", ["gradients", "parameters", "activations", "everything"])
@pytest.mark.parametrize("checkpointing", ["none", "every_n"])
def test_what_leaves_the_device_changes_no_bit(away, checkpointing, tmp_path):
    base = {**HALF, "checkpointing": {"policy": checkpointing}}
    places = EVERYTHING if away == "everything" else {away: "host", "activation_min_bytes": 1}
    file = {**to_file(tmp_path), "optimizer": "none", away: "file", "activation_min_bytes": 1}
    if away == "everything":
        file = {**places, **to_file(tmp_path), **dict.fromkeys(KINDS, "file")}
    ways = [places, file]
    expected, _, plain = train(base)
    for offload in ways:
        got, model, engine = train({**base, "offload": offload})
        assert [r.loss for r in got] == [r.loss for r in expected]
        assert [r.grad_norm for r in got] == [r.grad_norm for r in expected]
        state, other = plain.state_dict(), engine.state_dict()
        assert all(torch.equal(state[name], other[name]) for name in state)
        name = "layers.0.weight"
        assert torch.equal(plain.master(name), engine.master(name))
        assert (
            got[-1].accounts["optimizer" if away == "everything" else away]
            < (expected[-1].accounts["optimizer" if away == "everything" else away])
        )
        engine.give_back()
        assert torch.equal(dict(model.named_parameters())[name], state[name])


@pytest.mark.parametrize("checkpointing", ["none", "every_n"])
def test_activations_of_chosen_units_leave(checkpointing):
    """Each one more, and what the others save stays."""
    base = {**HALF, "checkpointing": {"policy": checkpointing}}
    expected, _, plain = train(base)
    held = []
    for units in (["layers.1"], ["layers.1", "layers.2"], ["layers.?"], []):
        places = {"activations": "host", "activation_min_bytes": 1, "activation_units": units}
        got, model, engine = train({**base, "offload": places})
        assert [r.loss for r in got] == [r.loss for r in expected]
        assert torch.equal(plain.master("layers.0.weight"), engine.master("layers.0.weight"))
        held.append(got[-1].host_bytes)
        engine.give_back()
        assert "forward" not in vars(model.layers[1])
    assert 0 < held[0] < held[1] < held[2] <= held[3]


def test_a_pattern_that_names_no_unit_is_refused():
    with pytest.raises(poise.Error, match="no module has the class or name layres"):
        train({"offload": {"activations": "host", "activation_units": ["layres.*"]}})
    with pytest.raises(poise.Error, match=r"offload.activation_units .* offload.activations"):
        train({"offload": {"activation_units": ["layers.*"]}})


def test_the_three_calls_offload_too():
    def run(offload):
        model = Stack()
        engine = poise.Engine(model, {"batch": {"accumulation": 2}, "offload": offload})
        losses = []
        for update in range(3):
            for x, _ in window(update)[:2]:
                loss = torch.nn.functional.mse_loss(engine(x), x)
                engine.backward(loss, tokens=len(x))
            engine.begin_update()
            gradient = engine.gradient("layers.1.weight")
            losses += [gradient.sum().item(), engine.step().loss]
        with torch.no_grad(), engine.forward_scope():
            losses.append(model(window(0)[0][0]).sum().item())
        return losses

    assert run({}) == run(EVERYTHING)


def test_touching_an_offloaded_parameter_says_where_it_is():
    model = Stack()
    engine = poise.Engine(model, {"offload": {"parameters": "host"}})
    with pytest.raises(RuntimeError, match="'layers.0.weight' is sharded over the ranks or offl"):
        model.layers[0].weight.sum()
    with pytest.raises(Error, match="or offloaded; use engine.state_dict"):
        model.state_dict()
    with engine.gathered(writer=0), torch.no_grad():
        model.layers[0].weight.fill_(0.5)
    assert engine.master("layers.0.weight").eq(0.5).all()


def test_trainer_takes_it_and_says_it(tmp_path, capfd):
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            x = torch.randn(128, generator=torch.Generator().manual_seed(index))
            return {"x": x, "labels": x}

    class Fit(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Stack()

        def forward(self, x, labels):
            return {"loss": torch.nn.functional.mse_loss(self.stack(x), labels)}

    def run(**arguments):
        model = Fit()
        arguments = poise.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-2,
            **arguments,
        )
        trainer = poise.Trainer(model=model, args=arguments, train_dataset=Data())
        trainer.train()
        return trainer.engine.state_dict()

    plain = run()
    offloaded = run(
        offload_optimizer="file",
        offload_gradients="file",
        offload_parameters="host",
        offload_activations="host",
        offload_directory=str(tmp_path / "scratch"),
    )
    said = "".join(capfd.readouterr())
    assert "offloaded: 100% of the optimizer states to a file in" in said
    assert "gradients to a file" in said
    assert "parameters to memory of the host, activ" in said
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)
    with pytest.raises(
        Error, match="offload_directory is None and what is offloaded goes to file, none; a file"
    ):
        poise.TrainingArguments(offload_optimizer="file")
    with pytest.raises(Error, match="offload_optimizer is 'disk'; use none, host, file"):
        poise.TrainingArguments(offload_optimizer="disk")


def test_poise_train_takes_it(tmp_path, capfd):
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
    run = {
        "batch": {"micro_batch_size": 2, "accumulation": 2},
        "precision": HALF["precision"],
        "model": {"layers": 2, "width": 16, "heads": 2, "sequence_length": 16},
        "data": {"train": [str(tmp_path / "text.txt")]},
        "train": {"max_updates": 3, "log_every": 1},
    }
    lines = {}
    for name, offload in {"device": {}, "file": to_file(tmp_path / "scratch")}.items():
        run["offload"] = offload
        run["train"]["output_dir"] = str(tmp_path / name)
        (tmp_path / "run.json").write_text(json.dumps(run))
        assert cli.main(["train", str(tmp_path / "run.json")]) == 0
        text = (tmp_path / name / "metrics.jsonl").read_text()
        lines[name] = [json.loads(line) for line in text.splitlines()]
    assert "100% of the optimizer states to a file in" in capfd.readouterr().out
    device, file = ([line["loss"] for line in lines[n] if "loss" in line] for n in lines)
    assert device == file
    assert lines["device"][-1]["file_bytes"] == 0 < lines["file"][-1]["file_bytes"]
    assert lines["file"][-1]["accounts"]["optimizer"] == 0


ON_A_FULL_DISK = """
import sys

import poise
import torch
from test_offload import HALF, Stack, to_file

folder = sys.argv[1]
model = Stack()
numel = sum(p.numel() for p in model.parameters())


def refused(call):
    try:
        call()
    except poise.Error as error:
        assert "[offload] cannot take" in str(error) and "No space left on device" in str(error)
        assert "offset" in str(error) and folder in str(error), error
        return
    raise AssertionError("no error")


def loss_fn(x):
    return torch.nn.functional.mse_loss(model(x), x), len(x)


refused(lambda: poise.Engine(Stack(), {**HALF, "offload": to_file(folder)}))  # 1.2 MB of states

away = {**to_file(folder), "optimizer": "none", "activations": "file"}
engine = poise.Engine(model, {"offload": {**away, "activation_min_bytes": 1}})
other = Stack()
plain = poise.Engine(other, {})
small, large = torch.ones(4, 128), torch.ones(2048, 128)  # the activations of one take 12 MB
losses = [engine.step([small], loss_fn).loss]
refused(lambda: engine.step([large], loss_fn))
losses.append(engine.step([small], loss_fn).loss)  # the window is gone, the run goes on


def plain_loss(x):
    return torch.nn.functional.mse_loss(other(x), x), len(x)


assert losses == [plain.step([small], plain_loss).loss for _ in range(2)]
assert engine.updates == 2
assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
print("as it should be")
"""


def test_a_disk_that_is_full_is_told_and_the_run_goes_on(tmp_path):
    """A tmpfs of 1 MiB, in a mount namespace of its own."""
    mount = f"mount -t tmpfs -o size=1m tmpfs '{tmp_path}' || exit 77; exec \"$@\""
    here = [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, "sh", *here], env=environment, timeout=120,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 77 or "Operation not permitted" in done.stdout:
        pytest.skip("only root may mount a small file system")
    assert done.stdout.endswith("as it should be\n"), done.stdout


def test_settings_that_contradict_are_errors(tmp_path):
    for words, offload in {
        "directory is empty": {"optimizer": "file"},
        "only for what is offloaded to file": {"directory": str(tmp_path)},
        "optimizer_fraction is given but is only for": {"optimizer_fraction": 0.5},
        "multiples of 4096": {**to_file(tmp_path), "block_bytes": 5000},
        "an update needs 16 blocks": {**to_file(tmp_path), "staging_bytes": 4096},
    }.items():
        with pytest.raises(Error, match=words):
            poise.Engine(Stack(), {"offload": offload})
