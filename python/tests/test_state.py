"""Engine.save and Engine.load from Python: to the bit, and readable by the safetensors library."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import poise
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn


class Net(nn.Module):
    """Dropout, batch statistics, a tied weight, a frozen parameter."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = norm(8)
        self.drop = nn.Dropout(0.3)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((8,), 0.5), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.embed(tokens))) * self.scale
        return self.head(torch.relu(self.hidden(x)))


def loss(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11), len(tokens)


def train(engine: poise.Engine, begin: int, end: int) -> list[float]:
    losses = []
    for update in range(begin, end):
        generator = torch.Generator().manual_seed(update)
        window = [torch.randint(11, (n,), generator=generator) for n in (9, 5)]
        losses.append(engine.step(window, lambda b: loss(engine.model, b)).loss)
    return losses


def made(seed: int, **precision: str) -> poise.Engine:
    torch.manual_seed(seed)
    config = {"optimizer": {"lr": 0.05}, "precision": precision}
    low = "parameters" in precision  # torch's BatchNorm does not run on bf16 parameters
    return poise.Engine(Net(nn.LayerNorm if low else nn.BatchNorm1d), config)


@pytest.mark.parametrize("precision", [{}, {"dtype": "bf16", "parameters": "bf16"}])
def test_resumed_is_unbroken(tmp_path: Path, precision: dict[str, str]) -> None:
    unbroken = made(0, **precision)
    train(unbroken, 0, 3)
    path = unbroken.save(tmp_path, cursor=5, user={"a": "b"}, own={"c": "d"})
    want = train(unbroken, 3, 7)

    resumed = made(1, **precision)
    loaded = resumed.load(tmp_path)
    assert repr(loaded) == f"LoadedState(path={loaded.path}, ranks=1)"
    assert train(resumed, 3, 7) == want
    for (name, ours), theirs in zip(
        resumed.model.state_dict().items(), unbroken.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert (loaded.path, loaded.cursor) == (path, 5)
    assert (loaded.user, loaded.own) == ({"a": "b"}, {"c": "d"})


def test_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    engine = made(0)
    train(engine, 0, 2)
    path = Path(engine.save(tmp_path))
    with safe_open(path / "rank-00000.safetensors", "pt") as file:
        masters = file.get_tensor("master@0:hidden.weight")
        assert torch.equal(masters, engine.model.hidden.weight.detach().flatten())
        assert torch.equal(file.get_tensor("value@0:scale"), engine.model.scale)
        assert torch.equal(
            file.get_tensor("buffer@0:norm.running_mean"), engine.model.norm.running_mean
        )
        assert "master@0:head.weight" not in file.keys()  # tied: under its first name
    manifest = json.loads((path / "manifest.json").read_text())
    tied = next(p for p in manifest["parameters"] if p["name"] == "embed.weight")
    assert tied["aliases"] == ["head.weight"]
    assert manifest["updates"] == 2


def test_export_is_the_model(tmp_path: Path) -> None:
    engine = made(0, dtype="bf16", parameters="bf16")
    train(engine, 0, 2)
    engine.save(tmp_path)
    file = tmp_path / "model.safetensors"
    poise._C.export_save(poise._C.find_save(str(tmp_path)), str(file))
    values = load_file(file)
    assert set(values) == set(engine.model.state_dict())
    assert torch.equal(values["head.weight"], values["embed.weight"])
    for name, value in values.items():  # the model's own types: fp32 masters here
        want = engine.model.scale.float() if name == "scale" else engine.master(name)
        assert value.dtype == want.dtype and torch.equal(value, want), name


def test_refusals_are_errors(tmp_path: Path) -> None:
    engine = made(0)
    with pytest.raises(poise.Error, match="no whole save in"):
        engine.load(tmp_path)
    path = Path(engine.save(tmp_path))
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(data)
    with pytest.raises(poise.Error, match="rank-00000.safetensors is damaged"):
        engine.load(tmp_path)


def test_extra_files_come_from_python(tmp_path: Path) -> None:
    engine = made(0)

    def extra(folder: str) -> None:
        (Path(folder) / "note.txt").write_text("kept")

    path = Path(engine.save(tmp_path, name="checkpoint-3", extra=extra))
    assert path.name == "checkpoint-3"
    assert (path / "note.txt").read_text() == "kept"

    def fails(folder: str) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.save(tmp_path, extra=fails)
    assert poise._C.list_saves(str(tmp_path)) == [str(path)]
    assert poise._C.find_save(str(tmp_path)) == str(path)


def test_a_transformers_folder_loads_into_a_cpp_module(tmp_path: Path) -> None:
    """In parts and in bf16, by state_test, which puts there what it has loaded."""
    transformers = pytest.importorskip("transformers")
    program = Path(poise.__file__).absolute().parents[2] / "tests" / "state" / "state_test"
    if not program.exists():
        pytest.skip(f"no {program}: only a build with its tests has one")
    config = transformers.GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=99, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 2
    subprocess.run(
        [program, "--gtest_filter=ModelFiles.MayBeATransformersFolder"], check=True, timeout=120,
        env={**os.environ, "POISE_TRANSFORMERS_MODEL": str(tmp_path)},
    )  # fmt: skip
    want = {name: value.float() for name, value in model.transformer.h[1].named_parameters()}
    with (tmp_path / "loaded").open("rb") as file:
        while line := file.readline().split():
            name, size = line[0].decode(), int(line[1])
            values = torch.frombuffer(bytearray(file.read(size)), dtype=torch.float32)
            assert torch.equal(values, want.pop(name).detach().flatten()), name
    assert not want


def torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.05, weight_decay=0.0, foreach=False)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    """The updates of train(), by torch alone."""
    for update in range(begin, end):
        generator = torch.Generator().manual_seed(update)
        window = [torch.randint(11, (n,), generator=generator) for n in (9, 5)]
        total = sum(count for _, count in (loss(model, b) for b in window))
        for batch in window:
            value, count = loss(model, batch)
            (value * count / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def without_dropout(seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net(nn.LayerNorm)
    model.drop.p = 0.0
    return model


OWN = {"optimizer": {"lr": 0.05, "weight_decay": 0.0, "max_grad_norm": 1.0}}


def close(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name, rtol=1e-4, atol=1e-5)


def test_optimizer_goes_to_torch_and_back(tmp_path: Path) -> None:
    """Three updates by one and three by the other are the six of torch alone, both ways."""
    want = without_dropout(0)
    plain(want, torch_adamw(want), 0, 6)

    engine = poise.Engine(without_dropout(0), OWN)
    train(engine, 0, 3)
    theirs, optimizer = without_dropout(1), None
    theirs.load_state_dict(engine.state_dict())
    exported = torch_adamw(engine.model)
    engine.export_optimizer(exported)
    optimizer = torch_adamw(theirs)
    torch.save(exported.state_dict(), tmp_path / "optimizer.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    plain(theirs, optimizer, 3, 6)
    close(theirs, want)

    begun = without_dropout(0)
    optimizer = torch_adamw(begun)
    plain(begun, optimizer, 0, 3)
    engine = poise.Engine(begun, OWN)
    engine.import_optimizer(optimizer)
    assert engine.updates == 3
    train(engine, 3, 6)
    close(engine.model, want)


def test_optimizer_of_another_kind_is_refused() -> None:
    engine = made(0)
    with pytest.raises(poise.Error, match="the optimizer is sgd, and the engine's is adamw"):
        engine.export_optimizer(torch.optim.SGD(engine.model.parameters(), lr=0.1))
    other = Net(nn.LayerNorm)
    with pytest.raises(poise.Error, match="has no parameter 'embed.weight'"):
        engine.import_optimizer(torch.optim.AdamW(other.parameters()))


def test_rehearsal_leaves_no_save(tmp_path: Path) -> None:
    engine = made(0)
    rehearsal = engine.rehearse_save(tmp_path)
    assert poise._C.list_saves(str(tmp_path)) == []
    path = Path(engine.save(tmp_path))
    assert rehearsal.bytes == (path / "rank-00000.safetensors").stat().st_size
    assert rehearsal.free_bytes > rehearsal.bytes and rehearsal.seconds > 0


class Exact(nn.Module):
    """Values that fp32 does not tell apart, frozen and in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        values = {
            "int64": torch.tensor([2**24, 2**62, -3]),
            "bool": torch.tensor([True, False]),
            "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.register_buffer("wide", torch.tensor([1.0, torch.nan, torch.inf]).double())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: None, []),
        (lambda m: m.int64[0].add_(1), ["value of int64: up to 1 apart, largest value"]),
        (lambda m: m.int64[1].sub_(1), ["value of int64: up to 1 apart, largest value"]),
        (lambda m: m.bool[1].fill_(True), ["value of bool: up to 1 apart, largest value 1"]),
        (lambda m: m.float8.copy_(torch.tensor([1.0, 4.0])), ["value of float8: up to 2 apart"]),
        (lambda m: m.wide[0].add_(1e-12), ["buffer wide differs"]),
        (lambda m: m.wide[1].fill_(1), ["buffer wide differs"]),
        (lambda m: m.weight[2].fill_(torch.nan), ["master of weight: up to nan apart"]),
    ],
)
def test_what_tells_two_saves_apart_is_exact(tmp_path: Path, change, expected) -> None:
    saves = []
    for number in range(2):
        model = Exact()
        with torch.no_grad():
            change(model) if number else None
        saves.append(poise.Engine(model).save(tmp_path / str(number)))
    lines = poise._C.save_differences(*saves)
    assert [line.split(", largest")[0] for line in lines] == [
        e.split(", largest")[0] for e in expected
    ]
