"""What goes wrong in whole runs of other trainers, by the behaviour that is right (see test_pitfalls.py):
memory, resuming, logged numbers, data."""

import copy
import time

import poise
import pytest
import torch
from hf_models import causal_rows, made
from poise import run_log, trainer_data
from test_hf_trainer import arguments, losses
from test_trainer import Rows, lines_of
from test_trainer import arguments as tiny_arguments
from tiny_models import same_bits, tiny
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def updates(trainer, key):
    return [line[key] for line in trainer.state.log_history if "loss" in line]


# Memory.


class Many(Dataset):
    """Rows that exist while they are asked for."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, 31, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def evaluation_peak(folder, size, **given):
    trainer = poise.Trainer(made("gpt2"), arguments(folder), eval_dataset=Many(size), **given)
    with poise.memory.Ledger() as ledger:
        metrics = trainer.evaluate()
    return ledger.snapshot().peak_bytes, metrics


def test_an_evaluation_of_any_length_holds_one_batch(tmp_path):
    # transformers 12878, 7158, 8476, 25313: all logits were kept.
    peaks = [evaluation_peak(tmp_path, size)[0] for size in (80, 1600)]
    assert 0 < peaks[1] <= 1.01 * peaks[0]


def test_metrics_over_reduced_logits_hold_the_reduced_ones(tmp_path):
    def first(logits, labels):
        return logits.argmax(-1)[:, :1]

    def mean(pair):
        return {"first": float(pair.predictions.mean())}

    given = {"preprocess_logits_for_metrics": first, "compute_metrics": mean}
    (small, _), (large, metrics) = (evaluation_peak(tmp_path, size, **given) for size in (80, 1600))
    kept = (1600 - 80) * (1 + 12) * 8  # a class and the labels of each row, in parts and joined
    assert large - small <= 2 * kept and "eval_first" in metrics


def test_a_run_out_of_memory_in_an_evaluation_leaves_the_training_batch_alone(tmp_path):
    # transformers 32215: the train batch was halved.
    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.full = made("gpt2"), False

        def forward(self, input_ids, labels=None):
            if not self.training and self.full:
                raise torch.OutOfMemoryError("out of memory, injected")
            return self.inner(input_ids=input_ids, labels=labels)

    args = poise.TrainingArguments(
        str(tmp_path), global_batch_size=8, memory_budget="64MiB", separable_loss=True, max_steps=2,
        logging_steps=1, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    rows, model = causal_rows(16), Hungry()
    trainer = poise.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train()
    before = trainer.args.per_device_train_batch_size
    model.full = True
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        trainer.evaluate()
    model.full = False
    assert trainer.args.per_device_train_batch_size == before
    assert trainer.train().global_step == 2


def test_an_evaluation_of_a_run_that_is_too_large_names_its_own_option(tmp_path):
    def run(folder, **given):
        args = poise.TrainingArguments(
            str(tmp_path / folder), global_batch_size=8, separable_loss=True, max_steps=4,
            logging_steps=1, disable_tqdm=True, use_cpu=True, eval_strategy="steps", eval_steps=2,
            offload_optimizer="none", **given,
        )  # fmt: skip
        rows, model = causal_rows(16), made("gpt2")
        trainer = poise.Trainer(model, args, train_dataset=rows, eval_dataset=rows * 64)
        return trainer, lambda: trainer.train()

    trainer, train = run("plenty", memory_budget="1GiB", per_device_eval_batch_size=1)
    train()
    budget = 2 * trainer.engine.memory()["peak_bytes"]
    trainer, train = run("large", memory_budget=budget, per_device_eval_batch_size=1024)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"with batches of 1024 .*per_device_eval_batch_size.*budget"
    ):
        train()
    assert trainer.state.global_step == 2 and trainer._halving.parts == 1
    trainer, train = run("small", memory_budget=budget, per_device_eval_batch_size=1)
    assert train().global_step == 4 and trainer._halving.parts == 1


def test_a_window_that_runs_out_three_times_is_halved_three_times_and_sees_every_sample_once(
    tmp_path,
):
    # composer 1081: a batch that was split already was split again; EuroEval 69: the window shrank.
    sizes = []

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Linear(1, 1)
            self.seen = []

        def forward(self, x):
            sizes.append(len(x))
            if len(x) > 2:
                raise torch.OutOfMemoryError("out of memory, injected")
            self.seen += x.flatten().tolist()
            return {"loss": self.weight(x).square().mean(), "n": len(x)}

    from poise.trainer_balance import Halving

    model = Small()
    engine = poise.Engine(model, {"optimizer": {"type": "sgd", "lr": 0.0}})
    halving = Halving(engine, lambda line: None)
    window = [torch.arange(16.0)[:, None]]
    result = halving(window, lambda pieces: engine.step(pieces))
    assert sizes == [16, 8, 4] + [2] * 8
    assert model.seen == list(range(16)) and result.tokens == 16


def test_resuming_takes_no_more_memory_than_training(tmp_path):
    # LlamaFactory 4710: out of memory on resume.
    def peak(folder, **given):
        args = arguments(folder, save_steps=1, gradient_accumulation_steps=2)
        trainer = poise.Trainer(made("gpt2"), args, train_dataset=causal_rows(16))
        trainer.train(**given)
        return max(line["peak_bytes"] for line in trainer.state.log_history if "loss" in line)

    trained = peak(tmp_path)
    assert peak(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2")) <= trained


# Resuming.


class Noisy(Dataset):
    """Rows with augmentation: each reading draws from torch's generator."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        row = {name: value.clone() for name, value in Rows(10)[index].items()}
        row["input_ids"][int(torch.randint(0, 12, ()))] = 3
        return row


class NoisyStream(IterableDataset):
    def __iter__(self):
        return (Noisy()[index] for index in range(10))


def in_own_order(sampler):
    """A loader, in an order that comes from the global generators, or one of the sampler's."""
    return DataLoader(Noisy(), batch_size=2, sampler=sampler)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "data",
    [
        Noisy,
        NoisyStream,
        lambda: DataLoader(NoisyStream(), batch_size=2),
        lambda: in_own_order(SubsetRandomSampler(range(10))),
        lambda: in_own_order(WeightedRandomSampler([1.0] * 10, 10)),
        lambda: in_own_order(SubsetRandomSampler(range(10), torch.Generator().manual_seed(7))),
    ],
)
def test_augmentation_and_dropout_go_on_where_they_were(data, at, tmp_path):
    # transformers 17032, 39215: generators were restored after the next window was read. The
    # epoch's short last window comes too (five micro-batches in windows of two).
    models, given = [], {"save_steps": 1, "lr_scheduler_type": "constant"}
    for folder, resume in ((tmp_path / "whole", None), (tmp_path / "again", f"checkpoint-{at}")):
        if resume:
            args = tiny_arguments(folder, max_steps=at, **given)
            poise.Trainer(tiny(dropout=0.2), args, train_dataset=data()).train()
        model = tiny(dropout=0.2)
        args = tiny_arguments(folder, max_steps=6, **given)
        trainer = poise.Trainer(model, args, train_dataset=data())
        output = trainer.train(resume_from_checkpoint=str(folder / resume) if resume else None)
        assert output.global_step == 6
        models.append(model)
    assert same_bits(*models)


def test_a_compiled_models_checkpoint_has_the_names_of_the_plain_one(tmp_path):
    # nanoGPT 325, torchtitan 961: _orig_mod. in front of every name.
    compiled = torch.compile(made("gpt2"), backend="eager")
    args = arguments(tmp_path, save_steps=1)
    trainer = poise.Trainer(compiled, args, train_dataset=causal_rows(8))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in ("checkpoint-1", "saved"):
        again = type(made("gpt2")).from_pretrained(tmp_path / folder)
        for p, q in zip(again.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(p, q)
    args = arguments(tmp_path, num_train_epochs=2)
    plain = poise.Trainer(made("gpt2", seed=5), args, train_dataset=causal_rows(8))
    plain.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert plain.state.global_step == 2


@pytest.mark.parametrize("seed", range(6))
def test_rotation_keeps_the_newest_and_the_best_whatever_the_metrics(seed, tmp_path):
    # transformers 11769, 25129, 39476: the newest, all or the best one was removed; 19300: one too many.
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (6,), generator=generator).double().tolist()  # with ties
    limit = 1 + seed % 3

    class Judged(poise.Trainer):
        def evaluate(self, *args, **kwargs):
            step = self.state.global_step
            kept = sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("checkpoint-*"))
            assert kept == list(range(1, step))[-limit:]
            return {"eval_loss": scores[step - 1]}

    args = arguments(
        tmp_path, save_steps=1, save_total_limit=limit, load_best_model_at_end=True, max_steps=6,
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    rows = causal_rows(16)
    trainer = Judged(made("gpt2"), args, train_dataset=rows, eval_dataset=rows[:2])
    trainer.train()
    best = scores.index(min(scores)) + 1
    assert trainer.state.best_global_step == best
    assert [p.name for p in (tmp_path / "best").glob("checkpoint-*")] == [f"checkpoint-{best}"]
    kept = sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("checkpoint-*"))
    assert kept == list(range(1, 7))[-limit:]


# Logged numbers.


def test_tokens_per_second_are_tokens_over_seconds(tmp_path, monkeypatch):
    # axolotl 3688, nanochat 177: off by the window, or a cumulative count over one update.
    now = [0.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])

    class Ticks(poise.TrainerCallback):
        def on_step_end(self, args, state, control, **details):
            now[0] += 2.0

    args = tiny_arguments(tmp_path, gradient_accumulation_steps=4, logging_steps=3, max_steps=7)
    data = Rows(32)
    tokens = [int((row["labels"][1:] != -100).sum()) for row in data.rows]
    args.train_sampling_strategy = "sequential"
    poise.Trainer(tiny(), args, train_dataset=data, callbacks=[Ticks()]).train()
    lines = [line for line in lines_of(tmp_path) if "loss" in line]
    windows = [sum(tokens[i : i + 8]) for i in range(0, 32, 8)] * 2
    assert [line["tokens_per_second"] for line in lines] == pytest.approx(
        [sum(windows[:3]) / 6, sum(windows[3:6]) / 6, windows[6] / 2]
    )


def test_the_loss_through_a_deepspeed_file_is_the_same(tmp_path):
    # transformers 11919, DeepSpeed 1107.
    seen = []
    for stage in (None, 2):
        given = {"deepspeed": {"zero_optimization": {"stage": stage}}} if stage else {}
        trainer = poise.Trainer(
            made("gpt2"), arguments(tmp_path, **given), train_dataset=causal_rows(16)
        )
        trainer.train()
        seen.append(losses(trainer))
    assert seen[1] == pytest.approx(seen[0], rel=1e-6)


# Data.


def test_the_seed_of_the_data_orders_it_and_the_same_one_the_same(tmp_path):
    # transformers 31818, 14647; torchtune 2335: it was not used.
    def order(**seeds):
        args = tiny_arguments(tmp_path, **seeds)
        data = [{"x": torch.tensor(i)} for i in range(20)]
        windows = trainer_data.train_windows(data, args)
        return [int(x) for _, w in zip(range(5), windows, strict=False) for b in w for x in b["x"]]

    assert order(data_seed=1) == order(data_seed=1) == order(data_seed=1, seed=7)
    assert order(data_seed=1) != order(data_seed=2)
    assert order(seed=1) != order(seed=2)


def test_batches_are_loaded_while_others_are_computed(tmp_path):
    # transformers 28498, accelerate 3168: the loader waited for the window.
    class Slow(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            time.sleep(0.05)
            return {"x": torch.ones(1)}

    class Busy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Linear(1, 1)

        def forward(self, x):
            time.sleep(0.1)
            return self.weight(x).mean()

    class Clock(poise.TrainerCallback):
        """How long it waits between the end of an update and the beginning of the next."""

        waited = []

        def on_step_begin(self, args, state, control, **details):
            if state.global_step > 1:
                self.waited.append(time.perf_counter() - self.end)

        def on_step_end(self, args, state, control, **details):
            self.end = time.perf_counter()

    clock = Clock()
    args = arguments(tmp_path, per_device_train_batch_size=1, dataloader_num_workers=1)
    poise.Trainer(Busy(), args, train_dataset=Slow(), callbacks=[clock]).train()
    assert len(clock.waited) == 8  # of four micro-batches, each 50 ms to load and 100 to compute
    hidden = 1 - sum(clock.waited) / (8 * 4 * 0.05)
    assert hidden >= 0.8


def test_the_default_collator_copies_nothing_into_the_next_epoch(tmp_path):
    # The same rows are read again in a second epoch, unchanged.
    data = Rows(6)
    before = copy.deepcopy(data.rows)
    poise.Trainer(tiny(), tiny_arguments(tmp_path), train_dataset=data).train()
    for a, b in zip(before, data.rows, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
