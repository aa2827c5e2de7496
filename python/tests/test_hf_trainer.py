"""Scripts of transformers' Trainer: its models, arguments, callbacks and subclasses with poise's."""

import copy

import hf_models
import poise
import pytest
import torch
import transformers
from hf_models import MODELS, causal_rows, counted, made, text_rows
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def arguments(folder, kind=poise.TrainingArguments, **changes):
    base = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }
    return kind(output_dir=str(folder), **{**base, **changes})


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def reference(name, model, windows, lr=1e-2, max_norm=1.0):
    """The same updates in float64, each window by single rows, weighed by the labels that count."""
    model = copy.deepcopy(model).double()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    seen = []
    for step, window in enumerate(windows):
        for group in optimizer.param_groups:
            group["lr"] = lr * (len(windows) - step) / len(windows)
        total = sum(counted(name, row) for row in window)
        optimizer.zero_grad()
        value = 0.0
        for row in window:
            if not (n := counted(name, row)):
                continue
            batch = {
                k: v[None].double() if v.is_floating_point() else v[None] for k, v in row.items()
            }
            loss = model(**batch).loss * (n / total)
            loss.backward()
            value += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        seen.append(value)
    return model, seen


def windows_of(rows, size=8):
    return [rows[i : i + size] for i in range(0, len(rows), size)]


# Models.


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_trains_as_a_big_batch_in_float64(name, tmp_path):
    rows = MODELS[name][1](20)  # windows of 8, 8 and 4
    model = made(name)
    expected, seen = reference(name, model, windows_of(rows))
    trainer = poise.Trainer(model, arguments(tmp_path), train_dataset=rows)
    trainer.train()
    assert losses(trainer) == pytest.approx(seen, rel=2e-5)
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p.double(), q, rtol=0, atol=2e-4), name


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_losses_are_token_exact_whatever_the_split(name, size, tmp_path):
    rows = MODELS[name][1](16)
    model = made(name)
    _, seen = reference(name, model, windows_of(rows))
    args = arguments(
        tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
    )
    trainer = poise.Trainer(model, args, train_dataset=rows)
    trainer.train()
    assert losses(trainer) == pytest.approx(seen, rel=1e-5)


def test_a_causal_loss_is_the_mean_over_predicted_labels(tmp_path):
    # Divided by all labels instead it would be (T - 1) / T of this.
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in causal_rows(8)]
    model = made("gpt2")
    with torch.no_grad():
        batch = torch.stack([row["input_ids"] for row in rows])
        logits = copy.deepcopy(model).double()(batch).logits
        mean = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    trainer = poise.Trainer(model, arguments(tmp_path), train_dataset=rows)
    assert trainer.train().training_loss == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_gradient_checkpointing_changes_nothing(name, tmp_path):
    rows = MODELS[name][1](16)
    seen = []
    for recompute in (False, True):
        model = made(name)
        args = arguments(tmp_path, gradient_checkpointing=recompute)
        trainer = poise.Trainer(model, args, train_dataset=rows)
        trainer.train()
        seen.append((losses(trainer), [p.detach().clone() for p in model.parameters()]))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(a, b) for a, b in zip(seen[0][1], seen[1][1], strict=True))


def test_a_model_keeps_no_cache_while_it_trains(tmp_path):
    model, seen = made("llama"), []
    model.config.use_cache = True
    model.register_forward_hook(lambda *call: seen.append(call[2].past_key_values))
    poise.Trainer(model, arguments(tmp_path), train_dataset=causal_rows(8)).train()
    assert seen == [None] * 4
    assert model.config.use_cache  # for generating, as before


# Arguments.


def test_transformers_own_arguments_train_the_same(tmp_path):
    rows = causal_rows(16)
    seen = []
    options = {"bf16": True, "warmup_steps": 1, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
    if transformers.__version__ < "5":
        options["optim"] = "adamw_torch"
    sampling = {} if hasattr(transformers.TrainingArguments, "train_sampling_strategy") else None
    for kind in (poise.TrainingArguments, transformers.TrainingArguments):
        given = dict(options)
        if sampling is None:
            given["train_sampling_strategy"] = "random"
        try:
            args = arguments(tmp_path, kind, **given)
        except TypeError:  # before 5 there is no such field, and the order is random
            args = without_strategy(tmp_path, kind, **options)
        trainer = poise.Trainer(made("gpt2"), args, train_dataset=rows)
        trainer.train()
        seen.append(losses(trainer))
    assert seen[0] == seen[1]


def without_strategy(folder, kind, **options):
    base = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(output_dir=str(folder), **{**base, **options})


def test_the_line_of_the_issue_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from poise import TrainingArguments

    args = TrainingArguments(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        bf16=True,
        optim="adamw_torch",
    )
    trainer = poise.Trainer(made("llama"), args, train_dataset=causal_rows(32))
    assert trainer.train().global_step == 6


# Loss.


def test_a_loss_function_gets_the_number_of_its_own_labels(tmp_path):
    rows = causal_rows(16)

    def by_sum(outputs, labels, num_items_in_batch):
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    def by_mean(outputs, labels):
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    _, seen = reference("gpt2", made("gpt2"), windows_of(rows))
    for loss_func in (by_sum, by_mean):
        trainer = poise.Trainer(
            made("gpt2"), arguments(tmp_path), train_dataset=rows, compute_loss_func=loss_func
        )
        trainer.train()
        assert losses(trainer) == pytest.approx(seen, rel=1e-5)


class WithLoss(poise.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class WithSuper(poise.Trainer):
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        self.calls += 1
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


class WithTrainingStep(poise.Trainer):
    steps = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.steps += 1
        return super().training_step(model, inputs, num_items_in_batch)


class WithOwnBackward(poise.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class WithOwnScope(poise.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        with self.engine.forward_scope():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize(
    "kind", [WithLoss, WithSuper, WithTrainingStep, WithOwnBackward, WithOwnScope]
)
def test_subclasses_with_a_loss_or_step_of_their_own_are_as_exact(kind, tmp_path):
    rows = causal_rows(20)
    expected, seen = reference("gpt2", made("gpt2"), windows_of(rows))
    model = made("gpt2")
    trainer = kind(model, arguments(tmp_path), train_dataset=rows, eval_dataset=rows[:4])
    trainer.train()
    assert losses(trainer) == pytest.approx(seen, rel=1e-5)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p.double(), q, rtol=0, atol=2e-4)
    plain = poise.Trainer(model, arguments(tmp_path), eval_dataset=rows[:4]).evaluate()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    if kind is WithSuper:
        assert trainer.calls >= 10
    if kind is WithTrainingStep:
        assert trainer.steps == 10


@pytest.mark.parametrize("kind", [WithTrainingStep, WithOwnBackward, WithOwnScope])
def test_a_step_of_ones_own_runs_under_the_same_autocast(kind, tmp_path):
    rows, seen = causal_rows(8), []
    for trainer_class in (poise.Trainer, kind):
        trainer = trainer_class(made("gpt2"), arguments(tmp_path, bf16=True), train_dataset=rows)
        trainer.train()
        seen.append(losses(trainer))
    exact = poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=rows)
    exact.train()
    assert seen[0] == seen[1] != losses(exact)


def test_label_smoothing_is_transformers_formula_over_the_window(tmp_path):
    rows, smoothing = causal_rows(8), 0.2
    model = made("gpt2")
    labels = torch.stack([row["labels"] for row in rows])
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(torch.stack([r["input_ids"] for r in rows])).logits
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=smoothing)
    expected = smoother({"logits": logits}, labels, shift_labels=True)
    args = arguments(tmp_path, label_smoothing_factor=smoothing)
    trainer = poise.Trainer(model, args, train_dataset=rows)
    assert trainer.train().training_loss == pytest.approx(float(expected), rel=1e-5)


# Data.


def test_keys_that_forward_does_not_take_are_dropped(tmp_path):
    rows = [{**row, "text": "x", "number": 3} for row in text_rows(8)]
    trainer = poise.Trainer(made("bert"), arguments(tmp_path), train_dataset=rows)
    assert trainer.train().global_step == 1

    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(hf_models.LENGTH, 3)

        def forward(self, input_ids, labels):
            return {"loss": nn.functional.cross_entropy(self.layer(input_ids.float()), labels)}

    assert poise.Trainer(Strict(), arguments(tmp_path), train_dataset=rows).train().global_step == 1
    keep = arguments(tmp_path, remove_unused_columns=False)
    with pytest.raises(TypeError, match="text"):
        poise.Trainer(Strict(), keep, train_dataset=rows).train()
    nothing = [{"words": [1, 2]} for _ in range(8)]
    with pytest.raises(poise.Error, match="nothing is left"):
        poise.Trainer(made("bert"), arguments(tmp_path), train_dataset=nothing).train()


def test_lists_of_numbers_and_a_label_become_a_batch(tmp_path):
    rows = [
        {"input_ids": row["input_ids"].tolist(), "label": int(row["labels"])}
        for row in text_rows(8)
    ]
    tensors = poise.Trainer(made("bert"), arguments(tmp_path), train_dataset=text_rows(8))
    lists = poise.Trainer(made("bert"), arguments(tmp_path), train_dataset=rows)
    assert lists.train().training_loss == tensors.train().training_loss
    rows[0]["input_ids"] = rows[0]["input_ids"][:5]
    with pytest.raises(poise.Error, match="samples of 5 and of 12 numbers.*processing_class"):
        poise.Trainer(made("bert"), arguments(tmp_path), train_dataset=rows).train()


class Padder:
    """As much of a tokenizer as a Trainer needs."""

    def pad(self, features, return_tensors):
        longest = max(len(f["input_ids"]) for f in features)
        rows = [
            f["input_ids"] + [hf_models.PAD] * (longest - len(f["input_ids"])) for f in features
        ]
        mask = [[1] * len(f["input_ids"]) for f in features]
        mask = [row + [0] * (longest - len(row)) for row in mask]
        label = torch.tensor([f["label"] for f in features])
        return {
            "input_ids": torch.tensor(rows),
            "attention_mask": torch.tensor(mask),
            "label": label,
        }


@pytest.mark.parametrize("name", ["processing_class", "tokenizer"])
def test_a_tokenizer_pads_the_batches(name, tmp_path):
    rows = [
        {"input_ids": row["input_ids"].tolist()[: 4 + i], "label": int(row["labels"])}
        for i, row in enumerate(text_rows(8))
    ]
    model = made("bert")
    trainer = poise.Trainer(model, arguments(tmp_path), train_dataset=rows, **{name: Padder()})
    assert trainer.train().global_step == 1
    assert trainer.processing_class.pad


class WithLoaders(poise.Trainer):
    asked = ()

    def get_train_dataloader(self):
        self.asked += ("train",)
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset=None):
        self.asked += ("eval",)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        self.asked += ("test",)
        return super().get_test_dataloader(test_dataset)


def test_subclasses_may_make_the_loaders(tmp_path):
    rows = causal_rows(16)
    plain = poise.Trainer(made("gpt2"), arguments(tmp_path), train_dataset=rows)
    trainer = WithLoaders(made("gpt2"), arguments(tmp_path), train_dataset=rows, eval_dataset=rows)
    assert trainer.train().training_loss == plain.train().training_loss
    trainer.evaluate()
    trainer.predict(rows)
    assert trainer.asked == ("train", "eval", "test")


# Optimizer.


def test_given_optimizer_and_scheduler_are_used(tmp_path):
    rows, model = causal_rows(16), made("gpt2")
    twin = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(optimizer.param_groups[0]["lr"]))
    args = arguments(tmp_path, max_grad_norm=0.0)
    trainer = poise.Trainer(model, args, train_dataset=rows, optimizers=(optimizer, scheduler))
    trainer.train()
    reference_optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for window in windows_of(rows):
        total = sum(counted("gpt2", row) for row in window)
        reference_optimizer.zero_grad()
        for row in window:
            batch = {k: v[None] for k, v in row.items()}
            (twin(**batch).loss * counted("gpt2", row) / total).backward()
        reference_optimizer.step()
        reference_optimizer.param_groups[0]["lr"] *= 0.1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.double(), q, rtol=0, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert hooked == pytest.approx([0.5, 0.05])


class WithOptimizer(poise.Trainer):
    def create_optimizer(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        return self.optimizer


def test_subclasses_may_make_the_optimizer_and_keep_the_schedule(tmp_path):
    trainer = WithOptimizer(made("gpt2"), arguments(tmp_path), train_dataset=causal_rows(16))
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == pytest.approx([3e-3, 1.5e-3])  # linear


def test_the_made_optimizer_is_the_engines_own(tmp_path):
    class Same(poise.Trainer):
        def create_optimizer(self):
            return super().create_optimizer()

    seen = []
    for kind in (poise.Trainer, Same):
        model = made("gpt2")
        args = arguments(tmp_path, weight_decay=0.3, adam_beta2=0.9, warmup_steps=1)
        kind(model, args, train_dataset=causal_rows(24)).train()
        seen.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
