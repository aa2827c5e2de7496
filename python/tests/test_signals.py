"""A signal within a Trainer's window: the window is dropped, all is saved, and the resumed run is the
unbroken one to the bit."""

import json
import os
import signal
import subprocess
import sys
import time

import poise
import pytest
import rank_processes
import torch
import transformers
from poise import callbacks, signals, trainer_saving
from poise.signals import AgreedEnd, AskedOfRanks, Signals
from signals_on_ranks import WINDOW, Interrupting, OwnStep
from test_trainer import Rows, arguments
from test_trainer_saving import lines_of, names
from tiny_models import TinyForCausalLM, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


class Watches(poise.TrainerCallback):
    """A method of this name makes the Trainer go micro-batch by micro-batch."""

    def on_substep_end(self, args, state, control, **details):
        pass


def trainer(folder, model, kind=poise.Trainer, callbacks=(), **changes):
    args = arguments(
        folder, per_device_train_batch_size=1, gradient_accumulation_steps=WINDOW, **changes
    )
    rows = Rows(2 * WINDOW - 3)  # two epochs: windows of 24, 21, 24, 21
    return kind(model, args, train_dataset=rows, callbacks=list(callbacks))


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("window", [0, 1, 2])  # 2 is the first one of an epoch
@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [(poise.Trainer, []), (OwnStep, []), (poise.Trainer, [Watches()])],
    ids=["step", "training_step", "substeps"],
)
def test_the_window_is_dropped_and_comes_again(tmp_path, kind, callbacks, window, strategy):
    whole = trainer(tmp_path / "whole", Interrupting(), kind, callbacks, save_strategy=strategy)
    whole.train()
    before = [0, WINDOW, 2 * WINDOW - 3][window]
    model = Interrupting(at=before + 2, number=signal.SIGUSR1)
    stopped = trainer(tmp_path / "out", model, kind, callbacks, save_strategy=strategy)
    with pytest.raises(signals.Interrupted) as caught:
        stopped.train()
    assert caught.value.number == signal.SIGUSR1
    assert model.forwards == before + 2  # the micro-batch that ran was the last one
    assert float(model.seen) == before  # as the save has it
    assert f"checkpoint-{window}" in names(tmp_path / "out")
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    resumed = trainer(
        tmp_path / "out", Interrupting(), kind, callbacks, save_strategy=strategy,
        resume_from_checkpoint=True,
    )  # fmt: skip
    resumed.train()
    assert same_bits(resumed.model, whole.model)
    assert float(resumed.model.seen) == float(whole.model.seen)
    assert lines_of(tmp_path / "out") == lines_of(tmp_path / "whole")


@pytest.mark.parametrize("theirs", [transformers.TrainerControl, callbacks.TrainerControl])
def test_a_callback_that_returns_flags_of_its_own_does_not_take_the_end_back(tmp_path, theirs):
    class Returns(poise.TrainerCallback):
        """As those do that begin with clean flags."""

        def on_save(self, args, state, control, **details):
            return theirs()

    model = Interrupting(at=2, number=signal.SIGUSR1)  # its window is trained to the end, the run's
    model.register_buffer("large", torch.ones(trainer_saving.SMALL_BUFFER // 4 + 1))
    stopped = trainer(tmp_path, model, callbacks=[Returns()], max_steps=1)
    with pytest.raises(signals.Interrupted):
        stopped.train()
    assert names(tmp_path) == ["checkpoint-1"] and stopped.state.global_step == 1


class JudgedSlowly(Interrupting):
    """Counts forwards of training and of evaluations apart; the signal comes in one of these."""

    def __init__(self, at=None):
        super().__init__()
        self.judged, self.judged_at = 0, at

    def forward(self, input_ids, labels):
        if self.training:
            return super().forward(input_ids, labels)
        self.judged += 1
        torch.rand(2)
        if self.judged == self.judged_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return TinyForCausalLM.forward(self, input_ids, labels)


BATCHES = 6  # of an evaluation


@pytest.mark.parametrize("saved", ["steps", "epoch"])
@pytest.mark.parametrize(
    ("evaluated", "update", "at"),
    [("steps", 1, 2), ("steps", 2, 8), ("steps", 4, 20), ("epoch", 2, 3), ("epoch", 4, 9)],
)
def test_an_evaluation_is_given_up_and_made_by_the_resumed_run(
    tmp_path, saved, evaluated, update, at
):
    def run(folder, model, **more):
        args = arguments(
            folder, per_device_train_batch_size=1, gradient_accumulation_steps=WINDOW,
            per_device_eval_batch_size=1, eval_strategy=evaluated, eval_steps=1,
            save_strategy=saved, save_steps=1, **more,
        )  # fmt: skip
        rows = Rows(2 * WINDOW - 3)
        made = poise.Trainer(model, args, train_dataset=rows, eval_dataset=Rows(BATCHES, seed=4))
        made.train()
        return made

    whole = run(tmp_path / "whole", JudgedSlowly())
    model = JudgedSlowly(at)
    with pytest.raises(signals.Interrupted):
        run(tmp_path / "out", model)
    assert model.judged == at  # no batch more
    assert names(tmp_path / "out")[-1] == f"checkpoint-{update}"
    resumed = run(tmp_path / "out", JudgedSlowly(), resume_from_checkpoint=True)
    assert same_bits(resumed.model, whole.model)
    assert lines_of(tmp_path / "out") == lines_of(tmp_path / "whole")


def test_the_evaluation_before_the_first_window_too(tmp_path):
    def run(folder, model, **more):
        args = arguments(
            folder, max_steps=2, eval_on_start=True, per_device_eval_batch_size=1, **more
        )
        made = poise.Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows(BATCHES))
        made.train()
        return made

    whole = run(tmp_path / "whole", JudgedSlowly())
    model = JudgedSlowly(2)
    with pytest.raises(signals.Interrupted):
        run(tmp_path / "out", model)
    assert (model.judged, model.forwards) == (2, 0)
    resumed = run(tmp_path / "out", JudgedSlowly(), resume_from_checkpoint=True)
    assert same_bits(resumed.model, whole.model)
    assert lines_of(tmp_path / "out") == lines_of(tmp_path / "whole")


class LargeBuffer(Interrupting):
    """One that changes from a micro-batch on, and counts in the loss."""

    def __init__(self, changes_from=1, at=None):
        super().__init__(at)
        self.changes_from = changes_from
        self.register_buffer("queue", torch.ones(trainer_saving.SMALL_BUFFER // 4 + 1))

    def forward(self, input_ids, labels):
        loss = super().forward(input_ids, labels)
        if self.seen >= self.changes_from:
            self.queue += 1
        return loss * self.queue.mean() / 8


@pytest.mark.parametrize(
    ("changes_from", "at", "saved", "dropped"),
    [
        (1, 2, 1, False),  # in the first window, which shows whether it changes
        (WINDOW + 1, WINDOW + 3, 2, False),  # in the window where it first does
        (1, WINDOW + 3, 1, True),
        (10**9, WINDOW + 3, 1, True),
    ],
)
def test_a_large_buffer_is_saved_as_the_window_found_it(tmp_path, changes_from, at, saved, dropped):
    whole = trainer(tmp_path / "whole", LargeBuffer(changes_from))
    whole.train()
    model = LargeBuffer(changes_from, at)
    stopped = trainer(tmp_path / "out", model)
    with pytest.raises(signals.Interrupted):
        stopped.train()
    assert (model.forwards == at) == dropped
    assert names(tmp_path / "out") == [f"checkpoint-{saved}"]
    resumed = trainer(tmp_path / "out", LargeBuffer(changes_from), resume_from_checkpoint=True)
    resumed.train()
    assert same_bits(resumed.model, whole.model)
    assert torch.equal(resumed.model.queue, whole.model.queue)


SCRIPT = """\
import sys

import poise
from signals_on_ranks import Interrupting
from test_signals import trainer

model = Interrupting()
model.slow_from, model.seconds = 1, 0.5
trainer(sys.argv[1], model).train()
"""


def test_a_process_ends_with_the_signals_status_before_its_window_could(tmp_path):
    [process] = rank_processes.start(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], 1, lambda *_: {"PYTHONUNBUFFERED": "1"}
    )
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1)  # into the window
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    [output] = rank_processes.finish([process], [128 + signal.SIGTERM])
    assert time.monotonic() - begin < 0.5 * WINDOW - 2
    assert "the open window was dropped, saved after update 0 in" in output
    assert "Traceback" not in output
    assert names(tmp_path) == ["checkpoint-0"]


def test_a_signal_on_one_of_two_ranks_drops_the_window_on_both(tmp_path):
    found = rank_processes.run("signals_on_ranks.py", "asked", tmp_path)
    for rank, cases in enumerate(found):
        assert len(cases) == 6
        for name, number, forwards, same in cases:
            assert number == signal.SIGTERM, name
            # The other rank hears of it by a note, and does not finish the window first.
            assert forwards == 2 if rank == 1 else 2 <= forwards < WINDOW / 2, (name, forwards)
            assert same, name


def test_a_signal_on_one_of_two_ranks_ends_the_evaluation_on_both(tmp_path):
    found = rank_processes.run("signals_on_ranks.py", "judged", tmp_path)
    assert len(found[0]) == 2
    for (name, *first), (_, *second) in zip(*found, strict=True):
        for number, judged, same in (first, second):
            assert number == signal.SIGTERM, name
            assert judged < 40, (name, judged)  # of 60
            assert same, name
        assert first[1] == second[1], name  # after the same batch


class Notes:
    """A group of two ranks, by the notes of its store."""

    def __init__(self):
        self.size, self.left, self.looks = 2, {}, 0

    def all_gather_text(self, text, what):
        return [text, text]

    def leave_note(self, key, text):
        self.left[key] = text

    def note(self, key):
        self.looks += 1
        return self.left.get(key)


def test_ranks_look_for_a_note_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    group = Notes()
    asked = AskedOfRanks(Signals(), group)
    assert [asked.now() for _ in range(5)] == [False] * 5 and group.looks == 1
    group.leave_note(asked._note, "yes")
    assert not asked.now()
    now += 2 * AskedOfRanks.LOOK_EVERY
    assert asked.now()


def test_ranks_of_an_evaluation_ask_each_other_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked = []

    class Slow(Notes):
        def all_gather_text(self, text, what):
            asked.append(json.loads(text))
            return [text, json.dumps([False, 3 * asked[-1][1]])]

    end = AgreedEnd(Signals(), Slow())
    for _ in range(1000):
        assert not end.now()
        now += 0.01  # 0.03 of the other rank: about 8 batches in EVERY seconds
    assert 1000 / 9 < len(asked) < 1000 / 6
    slow = AgreedEnd(Signals(), Slow())
    asked.clear()
    for _ in range(6):
        slow.now()
        now += 10
    assert len(asked) == 5  # nobody knows at the first one: two batches more, then each


@pytest.mark.parametrize("scope", ["saves_noted()", "signals_raised(saves=True)"])
def test_a_signal_that_comes_twice_lets_the_save_be_made_but_not_after_a_while(scope):
    """Slurm and torchrun each send one."""
    program = f"""
import os, signal, time
from poise import signals
signals.Signals.SAME_SIGNAL = 0.5
with signals.{scope} as came:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    print("asked", came.save_asked == signal.SIGTERM, flush=True)
    came.save_asked = None  # as taken for the save
    os.kill(os.getpid(), signal.SIGTERM)
    print("saves", came.save_asked is None, flush=True)
    time.sleep(0.6)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still there", flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert ended.stdout.splitlines() == ["asked True", "saves True"]
    assert ended.returncode == -signal.SIGTERM


def test_a_run_without_saves_leaves_signals_alone(tmp_path):
    model = Interrupting(at=2, number=signal.SIGUSR1)
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        trainer(tmp_path, model, save_strategy="no").train()
    finally:
        signal.signal(signal.SIGUSR1, old)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["epoch"] == 2


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_window_that_a_loss_drops_is_no_signal(tmp_path, strategy):
    class Drops(Interrupting):
        def forward(self, input_ids, labels):
            raise poise.WindowDropped

    with pytest.raises(poise.WindowDropped):
        trainer(tmp_path, Drops(), save_strategy=strategy).train()
