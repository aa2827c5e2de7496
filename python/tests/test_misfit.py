"""A budget below the floor: what is said of it in Python, and whether that works."""

from __future__ import annotations

import json
import re

import poise
import pytest
import torch
from balanced_runs import FUNCTION, Net, batch_of, call, engine_of, held, samples, train
from poise import balance, cli, placement
from poise.placement import Placement
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def nearest(text):
    return re.search(r"the nearest budget that works is (\S+);", text)[1]


def test_a_balance_that_does_not_fit_knows_the_smallest():
    model = Net()
    engine = engine_of(model)
    with pytest.raises(balance.NothingFits, match="take least, .*, most of it optimizer") as raised:
        balance.find(engine, batch_of, call(model), samples=16, budget=1000)
    error = raised.value
    assert error.smallest.micro_batch == 1 and error.floor == error.smallest.peak
    assert error.dominated_by == "optimizer"
    assert engine.checkpointing["policy"] == "none"


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.001, "what is held between micro-batches takes"),
        # States fit, but no micro-batch does beside them.
        (
            1.0002,
            "a micro-batch of 1 with every block recomputed ran out of the .* that were given",
        ),
    ],
)
def test_a_trainer_says_the_floor_and_a_budget_that_works(tmp_path, share, said):
    budget = int(share * held(Net()))
    with pytest.raises(balance.NothingFits, match=said) as raised:
        train(tmp_path / "below", max_steps=1, memory_budget=budget, offload_optimizer="none")
    text = str(raised.value)
    assert "the least that a global batch of 16 takes is" in text and "most of it optimizer" in text
    works = {"memory_budget": nearest(text), "offload_optimizer": "none", "max_steps": 1}
    trainer, _ = train(tmp_path / "works", **works)
    enough = poise.memory.parse_bytes(nearest(text))
    assert budget < trainer.engine.memory()["peak_bytes"] <= enough
    assert enough < 1.1 * trainer.engine.memory()["peak_bytes"]


def test_the_levers_that_are_named_would_fit(tmp_path):
    budget = int(1.0002 * held(Net()))
    with pytest.raises(balance.NothingFits) as raised:
        train(tmp_path / "below", max_steps=1, memory_budget=budget, offload_optimizer="none")
    same, other = re.search(
        "the same training would fit: (.*); another training would fit: (.*?);",
        str(raised.value),
    ).groups()
    assert "optimizer states on the host (offload.optimizer: host, " in same
    assert "moments in 8 bits (optimizer.moments: 8bit, " in other
    for number, given in enumerate(({"offload_optimizer": "host"}, {"optimizer_moments": "8bit"})):
        place = {"offload_optimizer": "none", **given}
        trainer, _ = train(tmp_path / str(number), memory_budget=budget, **place)
        assert trainer.engine.memory()["peak_bytes"] <= budget


def test_a_loss_that_may_not_be_split_is_named_as_what_keeps_the_floor_up(tmp_path):
    given = {"memory_budget": int(1.05 * held(Net())), "offload_optimizer": "none"}
    with pytest.raises(balance.NothingFits, match="separable_loss=True of a Trainer releases it"):
        train(tmp_path, model=Net(says_count=False), **given)


def test_another_budget_after_one_that_did_not_do_leaves_states_where_they_fit(tmp_path):
    args = poise.TrainingArguments(
        str(tmp_path), use_cpu=True, memory_budget=int(0.1 * held(Net())), global_batch_size=16,
        max_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = poise.Trainer(Net(), args, train_dataset=samples())
    with pytest.raises(balance.NothingFits):
        trainer.train()
    assert placement.of(trainer.args) == Placement()
    trainer.args.memory_budget = "64MiB"
    trainer.train()
    assert placement.of(trainer.args) == Placement() and trainer.engine.updates == 1


def test_warn_begins_and_runs_out(tmp_path, caplog):
    for share, begins in ((1.0002, True), (0.001, False)):
        caplog.clear()
        budget = int(share * held(Net()))
        with pytest.raises((torch.OutOfMemoryError, balance.NothingFits), match="out of memory"):
            train(
                tmp_path / str(share), memory_budget=budget, offload_optimizer="none",
                on_misfit="warn",
            )  # fmt: skip
        assert "it begins all the same, since on_misfit is warn" in caplog.text
        assert begins or "what is held between micro-batches" in caplog.text


def test_poise_train_of_a_model_of_python_says_it_too(tmp_path, capfd):
    (tmp_path / "misfit_net.py").write_text(FUNCTION)
    path = tmp_path / "run.json"

    def run(budget, **memory):
        document = {
            "model": {"import": "misfit_net:build"},
            "batch": {"global_batch_size": 8},
            "memory": {"budget_bytes": budget, **memory},
            "offload": {"optimizer": "none"},
            "train": {"output_dir": str(tmp_path / "out"), "max_updates": 2},
        }
        path.write_text(json.dumps(document))
        code = cli.main(["train", str(path)])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    states = 16 * 8 * (64 * 64 + 256)
    levers = {
        1000: "no lever alone is enough; the one that needs least: ",
        states
        + 100: "the same training would fit: optimizer states on the host (offload.optimizer",
    }
    for budget, lever in levers.items():
        code, text = run(budget)
        assert code == 1
        assert (
            "the least that a global batch of 8 takes is" in text and "most of it optimizer" in text
        )
        assert lever in text
        code, _ = run(nearest(text))
        assert code == 0
    code, text = run(states + 100, on_misfit="warn")
    assert code == 1 and "it begins all the same, since on_misfit is warn" in text


def test_a_plan_says_it_too():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    def plan(budget):
        return poise.plan(Plain(), torch.randn(4, 64), global_batch_size=4, memory_budget=budget)

    answer = plan(1000)
    assert not answer.fits and answer.misfit() in str(answer)
    assert "most of it optimizer" in answer.misfit() and "would fit: " in plan("200KiB").misfit()
    assert poise.memory.parse_bytes(nearest(answer.misfit())) >= answer.floor_bytes
    works = plan(nearest(answer.misfit()))
    assert works.fits and works.misfit() == ""
