"""`poise plan` of a described Llama, against what one of transformers holds in an engine."""

from __future__ import annotations

import json

import poise
import pytest
import torch
from poise import _C

SHAPE = {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 352, "vocabulary": 600}
SEQUENCE, MICRO_BATCH = 128, 4
# What transformers keeps beside tensors of the model's size: a row of positions.
POSITIONS = 8 * SEQUENCE + 64
# What bf16 products take inside is of the largest one (panels of their operands).
IN_BF16 = 0.004


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("POISE_MACHINE", "/nonexistent/machine.json")  # no measured rates
    yield
    torch.set_num_threads(before)


def described(shape: dict, precision: str, budget: int, tmp_path, capfd) -> dict:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(shape))
    arguments = f"--seq {SEQUENCE} --global-batch {2 * MICRO_BATCH} --micro-batch {MICRO_BATCH}"
    command = f"poise plan --model {path} --gpus 1xCPU {arguments} --precision {precision}"
    assert _C.cli_run([*command.split(), "--memory", str(budget), "--json"]) in (0, 1)
    answer = json.loads(capfd.readouterr().out)
    return answer["best" if answer["fits"] else "smallest"] | {"settings": answer["settings"]}


def measured(shape: dict, precision: dict, policy: dict) -> int:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=shape["layers"],
            hidden_size=shape["width"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            intermediate_size=shape["ffn"],
            vocab_size=shape["vocabulary"],
            tie_word_embeddings=shape.get("tied", False),
            max_position_embeddings=SEQUENCE,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    engine = poise.Engine(model, {"precision": precision, "checkpointing": policy})
    ids = torch.randint(
        shape["vocabulary"], (MICRO_BATCH, SEQUENCE), generator=torch.Generator().manual_seed(2)
    )
    window = [{"input_ids": ids, "labels": ids}] * 2
    for _ in range(2):
        engine.step(window, lambda batch: (model(**batch).loss, ids.numel()))
    return engine.memory()["peak_bytes"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True}, {"vocabulary": 40}, {"vocabulary": 4000, "tied": True, "layers": 1}],
    ids=["head", "tied", "blocks", "table"],
)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("fp32", {}),
        ("bf16", {"dtype": "bf16", "parameters": "bf16"}),
        ("bf16-autocast", {"dtype": "bf16"}),
    ],
)
def test_its_peak_is_that_of_transformers(name, precision, recomputed, changes, tmp_path, capfd):
    shape = {**SHAPE, **changes}
    found = described(shape, name, 1 if recomputed else 2**40, tmp_path, capfd)
    # Where the head is small, keeping the last block takes no more.
    assert (
        found["recomputed_blocks"] >= shape["layers"] - 1
        if recomputed
        else not found["recomputed_blocks"]
    )
    policy = found["settings"].get("checkpointing", {"policy": "none"})
    bound = POSITIONS + (0 if name == "fp32" else IN_BF16 * found["peak_bytes"])
    assert abs(found["peak_bytes"] - measured(shape, precision, policy)) <= bound
