"""What scripts of transformers' Trainer rely on: labels by name, flags of callbacks, caches."""

import hf_models
import poise
import pytest
import torch
import transformers
from hf_models import causal_rows, made
from test_hf_trainer import arguments, losses, without_strategy
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


STOPS = [
    ("on_train_begin", 0), ("on_epoch_begin", 3), ("on_step_begin", 2), ("on_substep_end", 2),
    ("on_pre_optimizer_step", 2), ("on_optimizer_step", 2), ("on_step_end", 2), ("on_log", 2),
    ("on_evaluate", 2), ("on_epoch_end", 3),
]  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("flag", ["should_training_stop", "should_epoch_stop"])
@pytest.mark.parametrize(("event", "at"), STOPS)
def test_a_flag_stops_where_transformers_does(event, at, flag, accumulation, tmp_path):
    def ask(self, args, state, control, **details):
        once = flag == "should_epoch_stop"
        if state.global_step == at or (state.global_step > at and not once):
            setattr(control, flag, True)

    asks = type("Asks", (transformers.TrainerCallback,), {event: ask})
    rows, updates = causal_rows(20), []  # 3 updates an epoch, the last one shorter
    for trainer in (transformers.Trainer, poise.Trainer):
        args = without_strategy(
            tmp_path / trainer.__module__,
            transformers.TrainingArguments,
            num_train_epochs=2,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            report_to="none",
        )
        made_one = trainer(
            made("gpt2"), args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[asks()]
        )
        made_one.train()
        updates.append(made_one.state.global_step)
    assert updates[1] == updates[0]


def test_what_a_callback_reads_of_optimizer_schedule_and_course(tmp_path):
    seen, rows = [], causal_rows(20)  # 10 micro-batches, 4 of them an update

    class Reads(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **rest):
            rates = [optimizer.param_groups[0]["lr"], lr_scheduler.get_last_lr()[0]]
            seen[-1].append((state.epoch, rates))

    ends = []
    for kind in (transformers.Trainer, poise.Trainer):
        seen.append([])
        args = without_strategy(
            tmp_path / kind.__module__,
            transformers.TrainingArguments,
            num_train_epochs=2,
            report_to="none",
            save_strategy="no",
        )
        trainer = kind(made("gpt2"), args, train_dataset=rows, callbacks=[Reads()])
        trainer.train()
        ends.append(trainer.state.log_history)
    theirs, ours = seen
    assert [epoch for epoch, _ in ours] == pytest.approx([epoch for epoch, _ in theirs])
    assert sum((rates for _, rates in ours), []) == pytest.approx(
        sum((rates for _, rates in theirs), [])
    )
    lines = [[line["epoch"] for line in end if "loss" in line] for end in ends]
    assert lines[1] == pytest.approx(lines[0], abs=1e-4)


def test_a_callback_that_sets_the_engines_rate_is_told(tmp_path):
    class Sets(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **rest):
            optimizer.param_groups[0]["lr"] = 0.5

    trainer = poise.Trainer(
        made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(8), callbacks=[Sets()]
    )
    with pytest.raises(poise.Error, match="set lr of the engine.s optimizer to 0.5; give optimiz"):
        trainer.train()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("how", ["gradient_checkpointing", "first_m", "memory_budget"])
def test_recomputed_blocks_keep_no_cache_and_hold_nothing_after_an_update(name, how, tmp_path):
    held = []

    class Held(poise.callbacks.TrainerCallback):
        def on_step_end(self, args, state, control, **details):
            held.append(trainer.engine.memory()["current"]["activations"])

    given = {
        "gradient_checkpointing": {"gradient_checkpointing": True},
        "first_m": {"checkpointing": {"policy": "first_m", "n": 1}},
        "memory_budget": {"memory_budget": "64MiB", "global_batch_size": 8},
    }[how]
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    given |= {} if how == "memory_budget" else split
    args = poise.TrainingArguments(
        str(tmp_path), num_train_epochs=3, disable_tqdm=True, use_cpu=True, **given
    )
    model = made(name)
    assert model.generation_config.use_cache
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    before = [config.use_cache for config in configs]
    trainer = poise.Trainer(model, args, train_dataset=causal_rows(16), callbacks=[Held()])
    trainer.train()
    assert held == [0.0] * 6
    assert [config.use_cache for config in configs] == before
    assert model.generation_config.use_cache
    tokens = torch.ones((1, 2), dtype=torch.long)
    assert model.generate(input_ids=tokens, max_new_tokens=2).shape[1] >= 2


class Wrapper(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.inner = made(name)

    def forward(self, input_ids, labels=None):
        return self.inner(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_wrapper_counts_as_the_model_in_it(name, tmp_path, caplog):
    rows = causal_rows(16)
    rows[1]["labels"][3:] = -100  # few count, so that one label more or less shows
    seen = []
    caplog.set_level("INFO", logger="poise")
    for size in (1, 8):
        args = arguments(
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
        )
        trainer = poise.Trainer(Wrapper(name), args, train_dataset=rows)
        trainer.train()
        seen.append(losses(trainer))
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    assert ("shift_labels=False says otherwise" in caplog.text) == (name == "llama")


@pytest.mark.parametrize("kind", ["Roberta", "Albert"])
def test_a_masked_model_counts_every_label_although_a_module_of_it_is_called_lm_head(
    kind, tmp_path
):
    sizes = {
        "vocab_size": hf_models.VOCABULARY, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    rows, seen = causal_rows(8), []
    for size in (1, 8):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind}ForMaskedLM")(config)
        args = arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
        )
        trainer = poise.Trainer(model, args, train_dataset=rows)
        trainer.train()
        seen.append(losses(trainer))
    assert seen[1] == pytest.approx(seen[0], rel=1e-6)


class Renamed(nn.Module):
    """A causal model whose labels have a name of their own, which shifts them itself."""

    def __init__(self):
        super().__init__()
        self.model = made("llama")

    def forward(self, input_ids, target=None):
        return self.model(input_ids=input_ids, labels=target)


def test_label_names_say_what_is_counted_and_predicted(tmp_path):
    rows = [{"input_ids": r["input_ids"], "target": r["labels"]} for r in causal_rows(16)]
    rows[1]["target"][2:] = -100
    seen = []
    for size in (2, 8):
        args = arguments(
            tmp_path / str(size),
            per_device_train_batch_size=size,
            per_device_eval_batch_size=size,
            gradient_accumulation_steps=8 // size,
            label_names=["target"],
        )
        trainer = poise.Trainer(Renamed(), args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        seen.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    labels = trainer.predict(rows).label_ids
    assert (labels == torch.stack([r["target"] for r in rows]).numpy()).all()


def test_labels_are_found_by_the_rule_of_transformers(tmp_path):
    config = transformers.BertConfig(
        vocab_size=hf_models.VOCABULARY, hidden_size=16, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=hf_models.LENGTH,
    )  # fmt: skip
    model = transformers.BertForQuestionAnswering(config)
    positions = [
        {"start_positions": torch.tensor(i), "end_positions": torch.tensor(i + 2)} for i in range(6)
    ]
    rows = [
        {"input_ids": r["input_ids"], **at} for r, at in zip(causal_rows(6), positions, strict=True)
    ]

    def starts(prediction):
        return {
            "starts": float((prediction.predictions[0].argmax(-1) + prediction.label_ids[0]).sum())
        }

    theirs = transformers.Trainer(
        model,
        without_strategy(tmp_path, transformers.TrainingArguments, report_to="none"),
        eval_dataset=rows,
        compute_metrics=starts,
    )
    ours = poise.Trainer(model, arguments(tmp_path), eval_dataset=rows, compute_metrics=starts)
    assert ours.label_names == theirs.label_names
    a, b = theirs.evaluate(), ours.evaluate()
    assert b["eval_starts"] == a["eval_starts"]
    assert b["eval_loss"] == pytest.approx(a["eval_loss"], rel=1e-5)
    for one, other in zip(
        theirs.predict(rows).label_ids, ours.predict(rows).label_ids, strict=True
    ):
        assert (one == other).all()
