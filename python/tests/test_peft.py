"""Models that peft wrapped: adapters train, all else stays as it is and costs no state."""

import copy

import peft
import poise
import pytest
import torch
from hf_models import causal_rows, made
from test_hf_trainer import arguments, losses, windows_of

pytestmark = pytest.mark.usefixtures("one_thread")

TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


def adapted(name):
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=TARGETS[name], task_type="CAUSAL_LM",
        fan_in_fan_out=name == "gpt2",
    )  # fmt: skip
    return peft.get_peft_model(made(name), config)


def reference(model, rows):
    """Adapters alone, in float64, by the window."""
    model = copy.deepcopy(model).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    windows, seen = windows_of(rows), []
    for step, window in enumerate(windows):
        optimizer.param_groups[0]["lr"] = 1e-2 * (len(windows) - step) / len(windows)
        batch = {k: torch.stack([row[k] for row in window]) for k in window[0]}
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        seen.append(loss.item())
    return model, seen


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_train_and_frozen_parameters_stay(name, recompute, tmp_path):
    rows, model = causal_rows(16), adapted(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    expected, seen = reference(model, rows)
    args = arguments(tmp_path, gradient_checkpointing=recompute)
    trainer = poise.Trainer(model, args, train_dataset=rows)
    trainer.train()
    assert losses(trainer) == pytest.approx(seen, rel=1e-5)
    theirs = dict(expected.named_parameters())
    for n, p in model.named_parameters():
        if n in before:
            assert torch.equal(p, before[n]), n
        else:
            assert torch.allclose(p.double(), theirs[n], rtol=0, atol=2e-4), n


def test_frozen_parameters_have_no_state(tmp_path):
    model = adapted("llama")
    trainer = poise.Trainer(model, arguments(tmp_path), train_dataset=causal_rows(8))
    trainer.train()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    padded = trained + 256 * sum(1 for p in model.parameters() if p.requires_grad)
    assert trainer.engine.memory()["current"]["optimizer"] <= 2 * 4 * padded
    with pytest.raises(poise.Error, match="frozen"):
        frozen = next(p for p in model.parameters() if not p.requires_grad)
        trainer.engine.moments(frozen)


def test_16_bit_frozen_parameters_stay_16_bit(tmp_path):
    model = adapted("llama")
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()
    trainer = poise.Trainer(model, arguments(tmp_path, bf16=True), train_dataset=causal_rows(16))
    trainer.train()
    assert all(torch.isfinite(torch.tensor(losses(trainer))))


@pytest.mark.parametrize("folder", ["adapter", "checkpoint-1"])
def test_an_adapter_saves_and_loads(folder, tmp_path):
    model = adapted("gpt2")
    poise.Trainer(model, arguments(tmp_path, save_steps=1), train_dataset=causal_rows(8)).train()
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / folder / "adapter_model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(made("gpt2"), tmp_path / folder)
    mine = dict(model.named_parameters())
    for n, p in again.named_parameters():
        assert torch.equal(p, mine[n]), n
