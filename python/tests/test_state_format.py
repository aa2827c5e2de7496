"""docs/state_format.md is enough to read a save: plain_reader against what the engine itself says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import plain_reader
import pytest
import rank_processes
import torch
from format_on_ranks import WAYS
from safetensors.numpy import load_file

RANKS = 2


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("format")
    return rank_processes.run("format_on_ranks.py", "saves", folder, size=RANKS)[0]


@pytest.mark.parametrize("way", list(WAYS))
def test_a_save_holds_what_the_page_says(saves, way):
    path, updates = saves[way]
    save = plain_reader.Save(path)  # checksums and sizes of all files
    told = torch.load(f"{path}.told", weights_only=True)
    manifest = save.manifest
    assert (manifest["updates"], manifest["ranks"], manifest["cursor"]) == (updates, RANKS, 77)
    assert manifest["user"] == {"a": "b"} and manifest["config"]["zero"]["stage"] == (
        WAYS[way].get("zero", {}).get("stage", 0)
    )
    assert [save.own[rank] for rank in range(RANKS)] == [{"rank": "0"}, {"rank": "1"}]
    seen = set()
    for entry in manifest["parameters"]:
        name, values = entry["name"], save.parameter(entry)
        seen |= {name, *entry["aliases"]}
        want = told[f"master {name}" if entry["trainable"] else f"state {name}"]
        assert numpy.array_equal(values, want.float().numpy()), name
        assert entry["order"] == ([1, 0] if name == "turned" else list(range(values.ndim)))
        for i in range(manifest["optimizer"]["moments"] if entry["trainable"] else 0):
            kind = f"moment.{i}"
            if "arrays" not in manifest["optimizer"]:
                moment = save.parameter(entry, kind)
                assert numpy.array_equal(moment, told[f"{kind} {name}"].numpy()), (kind, name)
                continue
            array = manifest["optimizer"]["arrays"][i]
            if array["factored"]:  # rows and columns, whole
                [(first, factors, _)] = save.runs[kind, name]
                shape = entry["shape"]
                count = sum(shape) if len(shape) == 2 else values.size
                assert (first, len(factors)) == (0, count), (name, shape)
                continue
            count = -(-values.size // array["block"])
            elements = save.elements(kind, name, count)
            if array["dtype"] == "BF16":
                moment = told[f"{kind} {name}"].numpy()
                in_memory = moment.transpose(entry["order"]) if moment.ndim else moment
                assert numpy.array_equal(elements, in_memory.flatten())
    assert seen | {"calls"} == {key[6:] for key in told if key.startswith("state ")}
    assert ["head.weight"] in [entry["aliases"] for entry in manifest["parameters"]]
    [calls] = manifest["buffers"]
    assert save.buffer(calls) == told["state calls"].item()
    kinds = {kind for kind, _ in save.runs}
    known = {"master", "value", "buffer", "random", "padding"}
    assert all(kind in known or kind.startswith("moment.") for kind in kinds)
    assert sorted(rank for _, _, rank in save.runs["random", "cpu"]) == list(range(RANKS))
    for entry in manifest["files"]:  # and safetensors' own reader takes them
        load_file(Path(path) / entry["name"]) if "bf16" not in way else None


def test_every_name_in_a_manifest_is_on_the_page(saves):
    page = (Path(__file__).parents[2] / "docs" / "state_format.md").read_text()
    names = set()

    def collect(value):
        for part in value if isinstance(value, list) else []:
            collect(part)
        for name, part in value.items() if isinstance(value, dict) else []:
            names.add(name)
            collect(part) if name not in ("user", "config") else None

    for path, _ in saves.values():
        collect(json.loads((Path(path) / "manifest.json").read_text()))
    assert {name for name in names if f"`{name}`" not in page} == set()
