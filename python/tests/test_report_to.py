"""report_to: poise's own trackers over stand-ins of their modules, every other service by transformers' callback."""

import sys
import types

import poise
import pytest
import transformers
from hf_models import causal_rows, made
from poise import report_to
from test_hf_trainer import arguments
from test_trainer import Rows
from test_trainer import arguments as tiny_arguments
from test_watching import Service, scalars, trained
from tiny_models import tiny
from transformers.integrations import integration_utils

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.run, module.begun = None, []

    def init(**given):
        module.begun.append(given)
        module.run = Service()
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


class Experiment:
    """As Comet's."""

    def __init__(self):
        self.seen, self.parameters = [], None

    def log_metrics(self, numbers, step=None):
        self.seen.append((step, dict(numbers)))

    def log_parameters(self, parameters):
        self.parameters = parameters


@pytest.fixture
def comet(monkeypatch):
    """start() gives the running experiment, else a new one, as comet_ml's does."""
    module = types.ModuleType("comet_ml")
    module.running, module.begun = None, []

    def start(mode=None, experiment_config=None):
        module.begun.append((mode, experiment_config))
        module.running = module.running or Experiment()
        return module.running

    module.start = start
    module.ExperimentConfig = lambda name=None: {"name": name}
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    for name in ("COMET_MODE", "COMET_EXPERIMENT_KEY"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_wandb_gets_the_lines_by_its_module(wandb, tmp_path):
    trained(tmp_path, report_to=["wandb"], run_name="mine", project="ours")
    (given,) = wandb.begun
    assert given["name"] == "mine" and given["project"] == "ours"
    assert given["config"]["learning_rate"] == 1e-2
    assert [step for step, _ in wandb.run.seen] == [1, 2, 2]
    trained(tmp_path, report_to="wandb")  # the open run is used
    assert len(wandb.begun) == 1 and len(wandb.run.seen) == 6


@pytest.mark.parametrize("given", ["comet_ml", ["comet_ml"]])
def test_comet_gets_the_lines_by_its_module(given, comet, tmp_path):
    trainer = trained(tmp_path, report_to=given, run_name="mine", eval_strategy="epoch")
    assert comet.begun == [(None, {"name": "mine"})]
    assert comet.running.parameters["learning_rate"] == 1e-2
    assert [step for step, _ in comet.running.seen] == [1, 2, 2, 2]
    assert comet.running.seen[0][1]["train/loss"] == trainer.state.log_history[0]["loss"]
    assert comet.running.seen[0][1]["train/accounts/parameters"] > 0
    assert comet.running.seen[2][1]["eval/loss"] == trainer.state.log_history[2]["eval_loss"]
    trainer.evaluate()
    assert len(comet.begun) == 1 and comet.running.seen[-1][0] == 2


def test_comet_goes_by_its_environment(comet, tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_MODE", "GET")
    trained(tmp_path, report_to="comet_ml")
    assert comet.begun[0][0] == "get"
    monkeypatch.setenv("COMET_MODE", "DISABLED")
    with pytest.raises(poise.Error, match="COMET_MODE is 'disabled'; set it to get, create"):
        poise.Trainer(tiny(), tiny_arguments(tmp_path, report_to="comet_ml"))


def evaluated(folder, **changes):
    trainer = poise.Trainer(made("gpt2"), arguments(folder, **changes), eval_dataset=causal_rows(4))
    return trainer.evaluate()["eval_loss"]


def test_an_evaluation_without_a_run_is_reported_too(wandb, comet, tmp_path):
    loss = evaluated(tmp_path, report_to=["wandb", "comet_ml"])
    assert wandb.run.seen[0][1]["eval/loss"] == comet.running.seen[0][1]["eval/loss"] == loss
    pytest.importorskip("tensorboard", reason="no tensorboard")
    loss = evaluated(tmp_path, report_to="tensorboard")
    assert scalars(tmp_path / "runs")["eval/loss"] == [(0, pytest.approx(loss))]


def test_a_service_that_is_not_there_is_an_error_that_says_how_to_get_it(tmp_path, monkeypatch):
    for name in ("wandb", "comet_ml"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(poise.Error, match=f"report_to {name}.*pip install {name}"):
            poise.Trainer(tiny(), tiny_arguments(tmp_path, report_to=name))
    monkeypatch.setattr(report_to.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(poise.Error, match="report_to tensorboard.*pip install tensorboard"):
        poise.Trainer(tiny(), tiny_arguments(tmp_path, report_to="tensorboard"))
    poise.Trainer(tiny(), tiny_arguments(tmp_path, report_to="all"))  # all that are there: none


def test_every_value_of_transformers_is_known():
    known = {*report_to.OURS, *report_to.THEIRS}
    assert set(integration_utils.INTEGRATION_TO_CALLBACK) <= known


class Noted(transformers.TrainerCallback):
    """As transformers' callback of a service."""

    made = []

    def __init__(self):
        self.events, self.lines = [], []
        Noted.made.append(self)

    def on_train_begin(self, args, state, control, **details):
        self.events.append((args.to_sanitized_dict()["seed"], state.is_hyper_param_search))

    def on_log(self, args, state, control, logs=None, **details):
        self.lines.append(logs)


@pytest.mark.parametrize("name", report_to.THEIRS)
def test_other_services_get_the_callback_of_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, Noted)
    trainer = trained(tmp_path, report_to=[name])
    one = Noted.made[-1]
    assert one.events == [(42, False)] and len(one.lines) == 3
    assert one.lines[0]["loss"] == trainer.state.log_history[0]["loss"]
    assert one.lines[0]["accounts/parameters"] > 0
    assert not any(isinstance(value, dict) for line in one.lines for value in line.values())
    assert trainer.pop_callback(Noted) is one


@pytest.mark.parametrize("name", report_to.THEIRS)
def test_what_transformers_says_of_a_service_that_is_not_there_is_said(name, tmp_path, monkeypatch):
    def absent():
        raise RuntimeError("requires it to be installed")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, absent)
    message = f"report_to {name} starts the callback of transformers.*requires it to be installed"
    with pytest.raises(poise.Error, match=message):
        poise.Trainer(tiny(), tiny_arguments(tmp_path, report_to=[name]))


def test_all_are_those_that_are_installed(wandb, tmp_path, monkeypatch):
    find = report_to.importlib.util.find_spec

    def only_wandb(name, *more):
        return (name == "wandb" or None) if name in report_to.OURS else find(name, *more)

    monkeypatch.setattr(report_to.importlib.util, "find_spec", only_wandb)
    monkeypatch.setattr(
        transformers.integrations,
        "get_available_reporting_integrations",
        lambda: ["wandb", "mlflow"],
    )
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "mlflow", Noted)
    trainer = poise.Trainer(
        tiny(), tiny_arguments(tmp_path, report_to="all"), train_dataset=Rows(8)
    )
    assert [type(one).__name__ for one in trainer.callbacks] == ["Wandb", "Noted"]


def test_tensorboard_is_there_where_only_tensorboardx_is(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(
        report_to.importlib.util, "find_spec", lambda name: name == "tensorboardX" or None
    )
    assert report_to._installed() == ["tensorboard"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("tensorbord", "tensorboard"), (["all", "comet"], "comet_ml"), ([None], "none")],
)
def test_a_wrong_name_is_told_the_nearest(given, meant, tmp_path):
    with pytest.raises(poise.Error, match=f"report_to has .*; did you mean {meant}"):
        poise.Trainer(tiny(), tiny_arguments(tmp_path, report_to=given))
