"""Trials of a balance, and windows that ran out of memory, leave nothing in a model that trains."""

from __future__ import annotations

import pytest
import torch
from balanced_runs import Net, batch_of, call, engine_of, with_and_without_a_plan
from poise import balance, trace, trainer_balance
from tiny_models import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


class Counts(Net):
    """Assigns a buffer anew, and sets something up in the first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("shift", torch.zeros(()))
        self.is_set_up, self.calls = False, 0

    def forward(self, ids, labels):
        loss, count = super().forward(ids, labels)
        if not self.is_set_up:
            self.shift.fill_(loss.detach())
            self.is_set_up = True
        self.calls += 1
        self.mean = self.mean * 0.5 + loss.detach()
        return loss * 0.5**self.calls + self.shift, count


def test_a_trial_leaves_buffers_that_are_assigned_and_numbers():
    model = Counts()
    engine, mean = engine_of(model), model.mean
    balance.find(engine, batch_of, call(model), samples=4, budget=1 << 30)
    assert model.mean is mean and model.calls == 0 and not model.is_set_up
    assert float(model.mean) == float(model.shift) == 0


def test_a_window_that_is_halved_begins_with_them_as_they_were():
    def seen(parts, fails):
        torch.manual_seed(0)
        model = Counts()
        engine = engine_of(model)
        halving = trainer_balance.Halving(engine, lambda line: None)
        halving.parts = parts

        def loss(batch):
            found = call(model)(batch)
            if fails and model.calls > 1 and len(batch["ids"]) > 2:
                raise torch.OutOfMemoryError("too many")
            return found

        result = halving([batch_of(4)] * 2, lambda window: engine.step(window, loss))
        return result.loss, float(model.mean), model.calls

    assert seen(1, fails=True) == seen(2, fails=False)


def test_a_trial_changes_nothing_of_a_run(tmp_path):
    found, given = with_and_without_a_plan(tmp_path, Counts)
    assert same_bits(found, given) and found.calls == given.calls


@pytest.mark.parametrize("dropped", ["trial", "window", "raising"])
def test_losses_of_fp16_are_weighed_by_the_first_micro_batch_that_counts(dropped):
    """A trial of one sample would make each loss of 16 as large as 16 losses, which overflow."""

    def results(*sizes):
        torch.manual_seed(0)
        model = Net()
        engine = engine_of(model, precision={"dtype": "fp16"}, batch={"accumulation": 1})
        loss = call(model)

        for size in sizes:
            if dropped == "trial":
                trace.measure(engine, batch_of(size), loss)
            elif dropped == "window":
                engine.backward(loss(batch_of(size)))
                engine.discard_window()
            else:
                window = [batch_of(size), None]
                with pytest.raises(TypeError):
                    engine.step(window, loss)
        return [
            (str(r.status), r.loss, r.grad_norm, r.loss_scale)
            for r in (engine.step([batch_of(16)], loss) for _ in range(3))
        ]

    plain = results()
    assert results(1) == results(1, 2) == plain and plain[-1][0] == "applied"
