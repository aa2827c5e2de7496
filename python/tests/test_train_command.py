"""`poise train` with "model": {"import": "module:function"}: the run of the C++ command, in Python."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from poise import _C, cli, run_file
from rank_processes import by_torchrun
from terminal import environment, run_in_terminal

SHAPE = {"layers": 2, "width": 16, "heads": 2, "sequence_length": 16}
NETS = """
import torch
from poise.data import byte_corpus
from poise.models import ByteGPT
from torch import nn
from torch.utils.data import IterableDataset


class Net(nn.Module):
    def __init__(self, **shape):
        super().__init__()
        self.gpt = ByteGPT(**shape)

    def forward(self, inputs, targets):
        return self.gpt.loss(inputs, targets)


def build(layers, width, heads, sequence_length, loss_chunk_tokens=0):
    return Net(layers=layers, width=width, heads=heads, sequence_length=sequence_length,
               loss_chunk_tokens=loss_chunk_tokens)


def with_data(text, **shape):
    train, validation = byte_corpus(text, shape["sequence_length"]).split(0.02)
    return Net(**shape), train, validation


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(5):
            yield {"x": torch.full((3,), float(i)), "labels": torch.tensor(i % 2)}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls, self.bad = 0, ()

    def forward(self, x, labels):
        self.calls += 1
        loss = nn.functional.cross_entropy(self.layer(x), labels)
        return loss * float("nan") if self.calls in self.bad else loss


def streaming(bad=()):
    model = Classifier()
    model.bad = bad
    return model, Stream()


def failing():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, inputs, targets):
            raise KeyError("of the model's own code")

    return Failing()


def no_model():
    return 3


def loader():
    return Classifier(), torch.utils.data.DataLoader([1, 2])


def empty():
    return Classifier(), []


def bad_eval():
    return Classifier(), Stream(), {}


def eval_alone():
    return Classifier(), None, Stream()


NOT_CALLABLE = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with nets.py, text.txt, and the current one."""
    (tmp_path / "nets.py").write_text(NETS)
    lines = [f"the cat sat on the mat, {i % 7} times.\n" for i in range(400)]
    (tmp_path / "text.txt").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    yield tmp_path
    sys.modules.pop("nets", None)


def settings(model, **sections):
    return {
        "model": model,
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "optimizer": {"lr": 3e-3},
        "schedule": {"type": "cosine", "warmup_updates": 2},
        "data": {"train": ["text.txt"]},
        "train": {"output_dir": "out", "max_updates": 12, "log_every": 4},
        **sections,
    }


IMPORTED = {"import": "nets:build", **SHAPE}


def train(folder, document, *settings_, flags=()):
    (folder / "run.json").write_text(json.dumps(document))
    changes = [part for setting in settings_ for part in ("--set", setting)]
    return cli.main(["train", str(folder / "run.json"), *changes, *flags])


def lines_of(folder, out="out"):
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


# The same run as the C++ command's.

MEASURED = ("tokens_per_second", "tokens_per_s", "language")


def without_measurements(lines):
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]


def comparable(text):
    """Text without rates, the model's name, and where the attention kernel is told."""
    text = re.sub(r"\d+ tokens/s", "N tokens/s", text)
    text = re.sub(r"poise trains \S+", "poise trains IT", text)
    return re.sub(r"(; attention by torch's \w+ kernel|\n  attention: .*)", "", text)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["train.validate_every=5", "data.shuffle=false", "checkpointing.policy=every_n"],
        ["data.validation=[\"text.txt\"]", "train.validation_batches=3", "data.prefetch=0"],
        ["train.validation_batches=0", "model.loss_chunk_tokens=7", "memory.budget_bytes=1GiB"],
        ["precision.dtype=fp16", "optimizer.groups=[{\"match\":\"*.bias\",\"lr_multiplier\":2}]"],
        ["precision.dtype=bf16", "precision.parameters=bf16", "train.profile_updates=[2,3]",
         "batch.accumulation=3", "batch.global_batch_size=0", "optimizer.type=sgd"],
    ],
    ids=lambda changes: "; ".join(changes) or "as it is",
)  # fmt: skip
def test_is_the_run_of_the_cpp_command(folder, capfd, changes):
    # Everything is the same, to the bit: losses, validation, bytes, the lines that are shown.
    assert train(folder, settings({**SHAPE, "builtin": "byte_gpt"}), *changes) == 0
    shown, lines = capfd.readouterr().out, lines_of(folder)
    assert train(folder, settings(IMPORTED), *changes) == 0
    ours = lines_of(folder)
    assert without_measurements(ours) == without_measurements(lines)
    assert ours[-1]["language"] == "python" and ours[-1]["tokens_per_s"] > 0
    names = [list(line) for line in lines]
    assert [list(line) for line in ours] == names  # in the same order too
    assert comparable(capfd.readouterr().out) == comparable(shown)
    assert (folder / "out" / "trace.json").exists() == ("train.profile_updates=[2,3]" in changes)


def test_own_datasets_are_read_in_the_order_of_the_corpus(folder):
    assert train(folder, settings(IMPORTED)) == 0
    expected = lines_of(folder)[-1]
    document = settings({"import": "nets:with_data", "text": "text.txt", **SHAPE}, data={})
    assert train(folder, document, "train.max_updates=12") == 0
    got = lines_of(folder)[-1]
    assert got["losses"] == expected["losses"] and got["val_loss"] == expected["val_loss"]


def test_a_stream_goes_on_into_its_next_pass(folder, capsys):
    document = settings({"import": "nets:streaming"}, data={}, batch={"micro_batch_size": 2})
    assert train(folder, document, "train.max_updates=7") == 0
    assert lines_of(folder)[-1]["tokens"] == 2 + 2 + 1 + 2 + 2 + 1 + 2  # passes of 5 samples
    assert "data of unknown length; 7 updates\n" in capsys.readouterr().out


def test_json_goes_to_standard_output(folder, capsys):
    assert train(folder, settings(IMPORTED), flags=["--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == lines_of(folder)
    assert err == ""


def test_is_found_beside_the_run_file_with_comments_in_it(folder, monkeypatch):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    text = json.dumps(settings(IMPORTED, data={"train": [str(folder / "text.txt")]}))
    (folder / "run.json").write_text('// a "comment"\n/* and\n one */' + text)
    monkeypatch.chdir(elsewhere)
    assert cli.main(["train", "../run.json", "--set", "train.max_updates=3"]) == 0
    assert len(lines_of(elsewhere)[-1]["losses"]) == 3


def test_comments_are_taken_out_of_text_only():
    text = '{"a": "no // comment", "b": "/* nor */ \\" // this", /* but */ "c": 1} // and this'
    assert json.loads(run_file.without_comments(text)) == {
        "a": "no // comment",
        "b": '/* nor */ " // this',
        "c": 1,
    }


def test_settings_reach_the_function_and_the_core(folder):
    document = settings({**IMPORTED, "layers": 7})
    assert train(folder, document, "model.layers=1", "optimizer.lr=0", "train.max_updates=3") == 0
    assert sys.modules["nets"].Net  # it ran here
    first, *_, summary = lines_of(folder)
    assert first["learning_rate"] == 0
    assert summary["losses"][0] != summary["losses"][2]  # other windows, the same model
    with_one_layer = sum(
        p.numel() for p in sys.modules["nets"].build(**{**SHAPE, "layers": 1}).parameters()
    )
    assert summary["accounts"]["parameters"] < 4 * 2 * with_one_layer


def test_function_and_keys_may_come_by_settings(folder):
    document = settings({})
    changes = ["model.import=nets:build", *(f"model.{k}={v}" for k, v in SHAPE.items())]
    assert train(folder, document, *changes, "train.max_updates=3") == 0
    assert lines_of(folder)[-1]["language"] == "python"


def test_the_own_model_of_first_run_trains_as_printed(folder):
    root = Path(__file__).parents[2]
    text = (root / "docs" / "first_run.md").read_text(encoding="utf-8")
    section = text.split("## Train a model of your own")[1].split("\n## ")[0]
    (folder / "nets.py").write_text(re.search(r"```python\n(.*?)```", section, re.S).group(1))
    document = json.loads(re.search(r"```json\n(.*?)```", section, re.S).group(1))
    document["data"]["train"] = [str(root / "docs")]
    arguments = re.search(r"poise train own\.json (.*)", section).group(1).split()
    assert train(folder, document, flags=arguments) == 0
    losses = lines_of(folder, document["train"]["output_dir"])[-1]["losses"]
    assert len(losses) == 20 and losses[-1] < losses[0]
    assert sum(p.numel() for p in sys.modules["nets"].build(64, 0).parameters()) == 33024


# Bad values.


@pytest.mark.parametrize(
    "model, words",
    [
        ({"import": "nets"}, 'write "module:function"'),
        ({"import": 3}, 'write "module:function"'),
        ({"import": "nets:build()"}, 'write "module:function"'),
        ({"import": "os; rm:x"}, 'write "module:function"'),
        ({"import": ".nets:build"}, 'write "module:function"'),
        ({"import": "no_such_nets:build"}, "there is no module no_such_nets; it is looked for"),
        ({"import": "nets.inner:build"}, "there is no module nets.inner"),
        ({"import": "nets:buidl"}, "no buidl in nets; did you mean build"),
        ({"import": "nets:NOT_CALLABLE"}, "NOT_CALLABLE is int, no function"),
        ({"import": "nets:no_model"}, "returned int; return a torch.nn.Module"),
        ({"import": "nets:build", "width": 1}, "does not take the keys of model: missing a required"),
        ({**IMPORTED, "widht": 16}, "unexpected keyword argument 'widht'"),
        ({**IMPORTED, "builtin": "byte_gpt"}, "keep one of them"),
        ({**IMPORTED, "sequence_length": 0}, "model.sequence_length is 0"),
    ],
)  # fmt: skip
def test_bad_models_are_named(folder, capsys, model, words):
    assert train(folder, settings(model)) == 1
    error = capsys.readouterr().err
    assert words in error and error.startswith("poise: error: [") and error.count("\n") == 1


@pytest.mark.parametrize(
    "changes, words, place",
    [
        (["optimizer.rl=1"], "nearest known one is optimizer.lr", "(in setting optimizer.rl=1)"),
        (["train.max_updates=0"], "train.max_updates is 0", "(in setting"),
        (["train.sample_bytes=20"], "only a builtin model writes text", ""),
        (["data.train=[]"], "data.train is empty", ""),
        (["data.train=[\"/no/such/text\"]"], "/no/such/text", ""),
        (["train.output_dir=/dev/null/out"], "cannot write /dev/null/out", ""),
        (["optimizer.momentum=0.9"], "only for optimizer.type sgd", "run.json with the settings given"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(folder, capsys, changes, words, place):
    assert train(folder, settings(IMPORTED), *changes) == 1
    error = capsys.readouterr().err
    assert words in error and place in error


def test_ranks_are_refused_rather_than_trained_apart(folder, capsys, monkeypatch):
    for name, value in by_torchrun(0, 2, 12345).items():
        monkeypatch.setenv(name, value)
    assert train(folder, settings(IMPORTED)) == 1
    assert "started on 2 ranks, which this command does not split over" in capsys.readouterr().err


def test_a_bad_section_is_named_with_the_file(folder, capsys):
    assert train(folder, settings(IMPORTED, optimiser={})) == 1
    error = capsys.readouterr().err
    assert "unknown key optimiser" in error and "run.json)" in error


@pytest.mark.parametrize(
    "function, changes, words",
    [
        ("with_data", ['data.train=["text.txt"]'], "data.train given, but"),
        ("with_data", ["data.prefetch=3", "data.suffix=.txt"], "data.suffix, data.prefetch given"),
        ("loader", [], "returned DataLoader to train on"),
        ("empty", [], "returned list to train on"),
        ("bad_eval", [], "returned dict to validate on"),
        ("eval_alone", [], "returned an eval_dataset without a train_dataset"),
        ("streaming", ["train.validate_every=3"], "returned no eval_dataset"),
    ],
)
def test_data_that_would_be_ignored_or_has_no_samples(folder, capsys, function, changes, words):
    extra = {"text": "text.txt", **SHAPE} if function == "with_data" else {}
    document = settings({"import": f"nets:{function}", **extra}, data={})
    assert train(folder, document, *changes) == 1
    assert words in capsys.readouterr().err


def test_a_missing_import_inside_the_module_is_its_own_error(folder):
    (folder / "nets.py").write_text("import no_such_thing_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        train(folder, settings(IMPORTED))


def test_files_without_import_are_those_of_the_cpp_command(folder, capfd):
    for text in ('{"optimiser": {}}', "{", '{"model": {"import": "a:b", "import": "a:c"}}', "[]"):
        (folder / "run.json").write_text(text)
        assert run_file.read(folder / "run.json") is None
        assert cli.main(["train", str(folder / "run.json")]) == 1
        assert "poise: error: [config]" in capfd.readouterr().err
    assert run_file.read(folder / "none.json") is None
    assert run_file.read("/dev/zero") is None  # read to its limit, not to its end


def test_the_cpp_command_names_the_one_that_can(folder, capfd):
    (folder / "run.json").write_text(json.dumps(settings({"depth": 3, **IMPORTED})))
    assert _C.cli_run(["poise", "train", str(folder / "run.json")]) == 1
    assert "`poise train` of the Python package" in capfd.readouterr().err


# Trouble on the way.


def test_nonfinite_loss_is_skipped_and_counted_or_stops(folder, capsys):
    document = settings({"import": "nets:streaming", "bad": [3]}, data={}, batch={})
    assert train(folder, document, "train.max_updates=5") == 0
    summary = lines_of(folder)[-1]
    assert summary["skipped"] == 1 and summary["losses"][2] == "nan"
    bad = next(line for line in lines_of(folder) if line.get("status") == "nonfinite_loss")
    assert bad["step"] == 3 and "nonfinite_loss" in capsys.readouterr().out
    assert train(folder, document, "engine.on_nonfinite=stop") == 1
    assert "the loss is nan" in capsys.readouterr().err
    assert "the loss is nan" in lines_of(folder)[-1]["error"]


def test_a_budget_that_runs_out_is_in_the_summary(folder, capsys):
    changes = ["memory.budget_bytes=600KiB", "batch.micro_batch_size=8", "model.sequence_length=64"]
    assert train(folder, settings(IMPORTED), *changes) == 1
    error = capsys.readouterr().err
    assert "The budget is 600.00 KiB" in error and "Traceback" not in error
    summary = lines_of(folder)[-1]
    assert summary["error"] in error and 0 < summary["peak_bytes"] <= 600 * 1024


def test_an_exception_of_the_model_keeps_its_type(folder):
    with pytest.raises(KeyError, match="own code"):
        train(folder, settings({"import": "nets:failing"}))
    assert "own code" in lines_of(folder)[-1]["error"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_cleanly(folder, number):
    (folder / "run.json").write_text(json.dumps(settings(IMPORTED)))
    command = [sys.executable, "-m", "poise", "train", "run.json", "--set",
               "train.max_updates=1000000"]  # fmt: skip
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        metrics, end = folder / "out" / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(number)
        out, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert f"ended by signal {int(number)}" in out
    summary = lines_of(folder)[-1]
    assert summary["error"] == f"ended by signal {int(number)}" and summary["updates"] >= 1


def test_handlers_of_signals_are_put_back(folder):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert train(folder, settings(IMPORTED), "train.max_updates=3") == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# On a terminal.


def test_a_terminal_gets_one_live_line(folder):
    (folder / "run.json").write_text(json.dumps(settings(IMPORTED)))
    status, text = run_in_terminal([sys.executable, "-m", "poise", "train", "run.json"], folder)
    assert status == 0
    updates = re.findall(r"\rupdate (\d+)/12 [^\r\n]*\x1b\[K", text)
    assert updates == [str(i) for i in range(1, 13)]
    live = text[text.index("\rupdate 1/") : text.index("update 12/")]
    assert "\n" not in live  # one line, written over
    assert "\n  validation after update 12" in text.replace("\r\n", "\n")


def test_dropout_and_seed_decide_the_run(folder):
    assert train(folder, settings(IMPORTED), "engine.seed=1", "train.max_updates=3") == 0
    first = lines_of(folder)[-1]["losses"]
    torch.rand(5)
    assert train(folder, settings(IMPORTED), "engine.seed=1", "train.max_updates=3") == 0
    assert lines_of(folder)[-1]["losses"] == first
    assert train(folder, settings(IMPORTED), "engine.seed=2", "train.max_updates=3") == 0
    assert lines_of(folder)[-1]["losses"] != first


def test_budget_and_global_batch_are_all_it_needs(folder, capfd):
    def losses(*changes):
        assert train(folder, settings(IMPORTED), *changes) == 0
        return capfd.readouterr().out, lines_of(folder)[-1]

    _, whole = losses("batch.micro_batch_size=8")
    for share in (1.0, 0.9):
        budget = int(whole["peak_bytes"] * share)
        text, found = losses("batch.micro_batch_size=0", f"memory.budget_bytes={budget}")
        assert "plan: " in text and "measured (+0.0%)" in text
        assert found["peak_bytes"] <= budget
        assert found["micro_batch"] * found["accumulation"] == 8
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert found["micro_batch"] < 8 or found["checkpointing"] != "none"


def test_a_stream_is_not_read_for_a_plan(folder, capfd):
    document = settings(
        {"import": "nets:streaming"},
        data={},
        batch={"global_batch_size": 4},
        memory={"budget_bytes": "1GiB"},
    )
    assert train(folder, document) == 1
    assert "is a stream, which would lose what the planner reads" in capfd.readouterr().err
