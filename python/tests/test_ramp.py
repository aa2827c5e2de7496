"""A Trainer whose windows grow: accumulation_ramp_from, accumulation_ramp_updates."""

from __future__ import annotations

import poise
import pytest
from poise.data import WindowIterator
from poise.run_length import RunLength
from poise.training_arguments import TrainingArguments
from test_trainer import Rows, arguments
from tiny_models import tiny
from torch.utils.data import DataLoader

ROWS = 11
RAMP = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "accumulation_ramp_from": 1,
    "accumulation_ramp_updates": 3,
    "num_train_epochs": 2,
    "max_steps": -1,
    "train_sampling_strategy": "sequential",
}
WINDOWS = [1, 2, 3, 4, 1, 4, 4, 3]  # 1 + 3 t / 3, and what is left of 11 samples


class Watches(poise.TrainerCallback):
    def __init__(self):
        self.lengths, self.tokens, self.epochs, self.losses = [], [], [], []

    def on_step_end(self, args, state, control, **details):
        result = details["result"]
        self.lengths.append(result.micro_batches)
        self.tokens.append(result.tokens)
        self.losses.append(result.loss)
        self.epochs.append(state.epoch)


def train(folder, data=None, resume=None, **changes):
    watch = Watches()
    args = arguments(folder, **{**RAMP, **changes})
    trainer = poise.Trainer(tiny(), args, train_dataset=data or Rows(ROWS), callbacks=[watch])
    trainer.train(resume_from_checkpoint=resume)
    return watch


def tokens_of(rows):
    return sum((row["labels"][1:] != -100).sum().item() for row in rows)


def expected_tokens():
    rows, at, found = Rows(ROWS).rows, 0, []
    for length in WINDOWS:
        found.append(tokens_of(rows[at : at + length]))
        at = (at + length) % ROWS
    return found


def test_windows_grow_and_take_every_sample_once_an_epoch(tmp_path):
    watch = train(tmp_path)
    assert watch.lengths == WINDOWS
    assert watch.tokens == expected_tokens()
    assert watch.epochs == pytest.approx([n / ROWS for n in (1, 3, 6, 10, 11, 15, 19, 22)])


def test_a_resumed_ramp_is_the_unbroken_one(tmp_path):
    whole = train(tmp_path, save_steps=2)
    rest = train(tmp_path / "rest", resume=str(tmp_path / "checkpoint-2"))
    assert rest.lengths == WINDOWS[2:] and rest.losses == whole.losses[2:]


def test_data_in_an_order_of_its_own(tmp_path):
    loader = DataLoader(Rows(ROWS), batch_sampler=[[i] for i in range(ROWS)])
    watch = train(tmp_path, loader)
    assert watch.lengths == WINDOWS and watch.tokens == expected_tokens()


def test_read_ahead_windows_of_such_data_are_refused():
    windows = WindowIterator(iter(range(9)), accumulation=2, prefetch=2)
    windows.set_accumulation(2)
    with pytest.raises(poise.Error, match="set prefetch to 0"):
        windows.set_accumulation(3)


@pytest.mark.parametrize("epochs", [0.5, 1, 1.5, 3, 7])
@pytest.mark.parametrize("ramp", [(1, 3), (2, 10), (4, 5), (1, 100)])
@pytest.mark.parametrize("batches", [3, 11, 40])
def test_updates_of_a_run(batches, ramp, epochs):
    args = TrainingArguments(
        gradient_accumulation_steps=4, accumulation_ramp_from=ramp[0], use_cpu=True,
        accumulation_ramp_updates=ramp[1], num_train_epochs=epochs,
    )  # fmt: skip
    run = RunLength.of(batches, args, ranks=2)
    # Epoch by epoch, window by window.
    ends, update = [0], 0
    for _ in range(8):
        left = batches
        while left > 0:
            left -= 2 * min(4, ramp[0] + (4 - ramp[0]) * min(update, ramp[1]) // ramp[1])
            update += 1
        ends.append(update)
    whole, part = int(epochs), epochs - int(epochs)
    wanted = ends[whole] + -(-int(part * 2) * (ends[whole + 1] - ends[whole]) // 2)
    assert run.updates == wanted
    assert run.epochs == next(n for n, end in enumerate(ends) if end >= wanted)
    assert run.part_of_epoch(ends[1]) == 1.0
    assert run.part_of_epoch(ends[2] - ends[1], ends[1]) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulation_ramp_from": 2}, "a ramp needs both"),
        ({"accumulation_ramp_updates": 2}, "a ramp needs both"),
        ({"accumulation_ramp_from": -1, "accumulation_ramp_updates": -1}, "a ramp needs both"),
        (
            {"accumulation_ramp_from": 5, "accumulation_ramp_updates": 2,
             "gradient_accumulation_steps": 4},
            "is 5, more than the 4 micro-batches",
        ),
        (
            {"accumulation_ramp_from": 1, "accumulation_ramp_updates": 2, "global_batch_size": 8,
             "memory_budget": "1GiB"},
            "leave open",
        ),
    ],
)  # fmt: skip
def test_ramps_that_make_no_sense(changes, message):
    with pytest.raises(poise.Error, match=message):
        TrainingArguments(use_cpu=True, **changes)
