"""The best evaluation of a run: stopping early by it, keeping its model, loading it at the end."""

import math

import poise
import pytest
import torch
import transformers
from hf_models import causal_rows, made
from test_hf_trainer import arguments

pytestmark = pytest.mark.usefixtures("one_thread")


class Judged(poise.Trainer):
    """Evaluations give these numbers, one after the other."""

    scores = (3.0, 1.0, 2.0, 5.0, 4.0)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.models, self._left = [], list(self.scores)

    def evaluate(self, *args, **kwargs):
        self.models.append({n: p.detach().clone() for n, p in self.model.named_parameters()})
        return {"eval_loss": self._left[0], "eval_score": self._left.pop(0)}


def judged(folder, callbacks=(), **given):
    args = arguments(folder, eval_strategy="steps", eval_steps=1, max_steps=5, **given)
    rows = causal_rows(16)
    trainer = Judged(
        made("gpt2"), args, train_dataset=rows, eval_dataset=rows[:2], callbacks=list(callbacks)
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("metric", "best"), [(None, 1), ("loss", 1), ("eval_loss", 1), ("score", 3)]
)
def test_the_best_model_is_loaded_at_the_end(metric, best, tmp_path):
    trainer = judged(tmp_path, load_best_model_at_end=True, metric_for_best_model=metric)
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, trainer.models[best][name]), name
    state = trainer.state
    assert (state.best_metric, state.best_global_step) == (trainer.scores[best], best + 1)
    assert state.best_model_checkpoint == str(tmp_path / "best" / f"checkpoint-{best + 1}")
    again = transformers.GPT2LMHeadModel.from_pretrained(state.best_model_checkpoint)
    for (name, p), q in zip(again.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize(("greater", "best"), [(True, 4.0), (False, 1.0)])
def test_a_nan_that_came_first_is_never_the_best(greater, best, tmp_path, monkeypatch):
    monkeypatch.setattr(Judged, "scores", (float("nan"), 2.0, 1.0, 4.0, float("nan")))
    trainer = judged(
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=greater,
    )
    assert trainer.state.best_metric == best


def test_a_limit_of_checkpoints_does_not_reach_the_best(tmp_path):
    trainer = judged(tmp_path, load_best_model_at_end=True, save_steps=1, save_total_limit=1)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-5"]
    assert [p.name for p in (tmp_path / "best").glob("checkpoint-*")] == ["checkpoint-2"]
    assert trainer.state.best_global_step == 2


def test_save_strategy_best_saves_that_alone(tmp_path):
    judged(tmp_path, save_strategy="best")
    assert list(tmp_path.glob("checkpoint-*")) == []
    assert [p.name for p in (tmp_path / "best").glob("checkpoint-*")] == ["checkpoint-2"]


def test_transformers_early_stopping_stops(tmp_path):
    stop = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = judged(tmp_path, [stop], load_best_model_at_end=True)
    assert trainer.state.global_step == 4  # 3, 1, then two that are no better


def test_a_resumed_run_knows_the_best(tmp_path):
    judged(tmp_path, load_best_model_at_end=True, save_steps=3)
    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=1, max_steps=5, load_best_model_at_end=True,
        save_steps=3,
    )  # fmt: skip
    rows = causal_rows(16)
    trainer = Judged(made("gpt2"), args, train_dataset=rows, eval_dataset=rows[:2])
    trainer._left = [1.5, 2.5]
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 2)


def test_a_plateau_scheduler_watches_the_evaluations(tmp_path):
    rows, model = causal_rows(16), made("gpt2")
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, factor=0.1)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=5)
    trainer = Judged(
        model, args, train_dataset=rows, eval_dataset=rows[:2], optimizers=(sgd, plateau)
    )
    trainer.train()
    assert math.isclose(sgd.param_groups[0]["lr"], 1e-3)  # three evaluations were no better


def test_what_cannot_decide_is_an_error(tmp_path):
    with pytest.raises(poise.Error, match="load_best_model_at_end with eval_strategy no"):
        poise.TrainingArguments(load_best_model_at_end=True)
    with pytest.raises(poise.Error, match="is 'f1', but an evaluation gave eval_loss, eval_score"):
        judged(tmp_path, load_best_model_at_end=True, metric_for_best_model="f1")
