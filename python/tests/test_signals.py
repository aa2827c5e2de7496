"""A signal within a Trainer's window: the window is dropped, all is saved, and the resumed run is the
unbroken one to the bit."""

import json
import signal
import sys
import time

import poise
import pytest
import rank_processes
from poise import signals
from poise.signals import AskedOfRanks, Signals
from signals_on_ranks import WINDOW, Interrupting, OwnStep
from test_trainer import Rows, arguments
from test_trainer_saving import lines_of, names
from tiny_models import same_bits

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
