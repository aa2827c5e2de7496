"""`poise plan` of a described Llama, against what one of transformers holds in an engine."""

from __future__ import annotations

import json

import poise
import pytest
import torch
from poise import _C

SHAPE = {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 352, "vocabulary": 600}
SEQUENCE, MICRO_BATCH = 128, 4
POSITIONS = 8 * SEQUENCE  # recomputed blocks keep a row of them
ROOTS = 4 * MICRO_BATCH * SEQUENCE  # of a 16-bit norm, counted a moment too long
# Panels that bf16 products copy are read off products of fewer columns.
IN_BF16 = 0.002


# Plans ask how many threads there are.
pytestmark = pytest.mark.usefixtures("one_thread", "no_measured_rates")


def whole_answer(shape: dict, precision: str, budget: int, tmp_path, capfd) -> dict:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(shape))
    arguments = f"--seq {SEQUENCE} --global-batch {2 * MICRO_BATCH} --micro-batch {MICRO_BATCH}"
    command = f"poise plan --model {path} --gpus 1xCPU {arguments} --precision {precision}"
    assert _C.cli_run([*command.split(), "--memory", str(budget), "--json"]) in (0, 1)
    return json.loads(capfd.readouterr().out)


def described(*job) -> dict:
    answer = whole_answer(*job)
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
    bound = POSITIONS if recomputed else 0
    if name != "fp32":
        bound += ROOTS + IN_BF16 * found["peak_bytes"]
    assert abs(found["peak_bytes"] - measured(shape, precision, policy)) <= bound


def test_it_is_planned_for_the_threads_that_there_are(tmp_path, capfd):
    """Each has scratch of its own in an attention, which takes more than so small an MLP."""
    found = []
    for threads in (1, 32):
        torch.set_num_threads(threads)
        answer = whole_answer({**SHAPE, "ffn": 8}, "fp32", 1, tmp_path, capfd)
        names = [one["moment"] for one in answer["moments"]]
        first = answer["moments"][names.index("forward of block 0")]
        found.append(first["accounts"]["activations"])
    assert found[0] < found[1]
