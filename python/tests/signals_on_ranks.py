"""One rank of test_signals.py: `signals_on_ranks.py CASE FOLDER`, started by rank_processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import poise
import rank_processes
import torch
import torch.distributed as dist
from poise import signals
from test_trainer import Rows, arguments
from tiny_models import TinyForCausalLM
from trainer_on_ranks import digest

WINDOW = 24  # micro-batches of a rank


class Interrupting(TinyForCausalLM):
    """Sends its own process a signal in the forward of micro-batch `at`; from `slow_from` on one takes
    `seconds`."""

    def __init__(self, at=None, number=signal.SIGTERM):
        torch.manual_seed(0)
        super().__init__(dropout=0.2)
        self.register_buffer("seen", torch.zeros(()))  # as running statistics
        self.forwards, self.at, self.number, self.slow_from = 0, at, number, None
        self.seconds = 0.1

    def forward(self, input_ids, labels):
        self.forwards += 1
        self.seen += 1
        if self.forwards == self.at:
            os.kill(os.getpid(), self.number)
        if self.slow_from is not None and self.forwards >= self.slow_from:
            time.sleep(self.seconds)
        return super().forward(input_ids, labels)


class OwnStep(poise.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


def train(kind, folder, model, stage=0, resume=None):
    args = arguments(
        folder,
        zero_stage=stage,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=WINDOW,
        num_train_epochs=1,
        max_steps=3,
    )
    trainer = kind(model, args, train_dataset=Rows(3 * WINDOW * 2))
    trainer.train(resume_from_checkpoint=resume)
    return digest(trainer.engine.state_dict())


class Judged(Interrupting):
    """The signal comes in a forward of an evaluation, which are slow from then on."""

    def __init__(self, at=None):
        super().__init__()
        self.judged, self.judged_at = 0, at

    def forward(self, input_ids, labels):
        if not self.training:
            self.judged += 1
            torch.rand(2)
            if self.judged == self.judged_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if self.slow_from is not None and self.judged >= self.slow_from:
                time.sleep(0.05)
        return TinyForCausalLM.forward(self, input_ids, labels)


def judge(folder, model, stage, strategy, resume=None):
    args = arguments(
        folder,
        zero_stage=stage,
        num_train_epochs=1,
        eval_strategy=strategy,
        eval_steps=1,
        per_device_eval_batch_size=1,
    )
    trainer = poise.Trainer(model, args, train_dataset=Rows(16), eval_dataset=Rows(120, seed=3))
    trainer.train(resume_from_checkpoint=resume)
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    kept = [(line["step"], line["eval_loss"]) for line in lines]
    return [digest(trainer.engine.state_dict()), kept]


def judged(folder):
    """One rank gets a signal in an evaluation of 60 batches each."""
    found = []
    for stage, strategy in ((3, "steps"), (1, "epoch")):
        place = folder / f"{stage}{strategy}"
        whole = judge(place / "whole", Judged(), stage, strategy)
        model = Judged(5 if dist.get_rank() == 1 else None)
        model.slow_from = 5
        try:
            judge(place / "out", model, stage, strategy)
        except signals.Interrupted as interrupted:
            number = interrupted.number
        resumed = judge(place / "out", Judged(), stage, strategy, resume=True)
        found.append([place.name, number, model.judged, resumed == whole])
    return found


def asked(folder):
    """One rank gets a signal in its second micro-batch of the second window."""
    found = []
    for kind in (poise.Trainer, OwnStep):
        for stage in (1, 2, 3):
            place = folder / f"{kind.__name__}{stage}"
            whole = train(kind, place / "whole", Interrupting(), stage)
            model = Interrupting(at=WINDOW + 2 if dist.get_rank() == 1 else None)
            model.slow_from = WINDOW + 1
            try:
                train(kind, place / "out", model, stage)
            except signals.Interrupted as interrupted:
                number = interrupted.number
            resumed = train(kind, place / "out", Interrupting(), stage, resume=True)
            found.append([place.name, number, model.forwards - WINDOW, resumed == whole])
    return found


def main(name, folder):
    torch.set_num_threads(1)
    value = {"asked": asked, "judged": judged}[name](Path(folder))
    rank_processes.report(name, folder, dist.get_rank(), value)


if __name__ == "__main__":
    main(*sys.argv[1:])
