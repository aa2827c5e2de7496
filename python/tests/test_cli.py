"""The command `poise`: the C++ command line reached from Python, with the codes it promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import poise

ROOT = Path(__file__).parents[2]
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(poise.__file__)))


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "poise", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": PACKAGE}  # found from any folder
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment
    )


def test_version_and_help() -> None:
    assert poise.__version__ in run("--version").stdout
    text = run("--help").stdout
    assert all(command in text for command in ("train", "config", "doctor", "bench", "demo"))


def test_every_command_has_a_help_of_its_own() -> None:
    text = run("--help").stdout
    commands = re.findall(r"^  (\w+) {2,}(\S.*)$", text.split("Subcommands:")[1], re.M)
    names = [name for name, _ in commands]
    assert names == ["train", "config", "doctor", "bench", "demo"]
    columns = {line.index(sentence) for name, sentence in commands
               for line in text.splitlines() if line.startswith(f"  {name} ")}  # fmt: skip
    assert len(columns) == 1  # one table, whichever language a command is in
    words = {"train": "module:function", "config": "--reference", "doctor": "instruction sets",
             "bench": "step_vs_torch", "demo": "report.html"}  # fmt: skip
    for name in names:
        done = run(name, "--help")
        assert done.returncode == 0 and words[name] in done.stdout, name
        assert done.stderr == "" and f"poise {name}" in done.stdout, done.stderr


def test_help_keeps_its_order_in_a_pipe() -> None:
    # C++ and Python print through buffers of their own.
    text = run("--help").stdout
    assert text.index("Usage") < text.index("doctor") < text.index("of the Python package")
    assert run("train", "--help").stdout.rstrip().endswith("trains a model of Python.")


def test_the_run_file_of_first_run_trains_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "first_run.md").read_text(encoding="utf-8")
    run_file = json.loads(re.search(r"```json\n(.*?)```", text, re.S).group(1))
    run_file["data"]["train"] = [str(ROOT / "docs")]
    (tmp_path / "run.json").write_text(json.dumps(run_file))
    losses = {}
    for name, settings in (("whole", []), ("split", ["--set", "batch.micro_batch_size=1"])):
        settings += ["--set", f"train.output_dir={name}", "--set", "train.max_updates=6"]
        done = run("train", "run.json", *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = json.loads(lines[-1])["losses"]
    assert len(losses["whole"]) == 6
    pairs = zip(losses["whole"], losses["split"], strict=True)
    assert all(abs(a - b) <= 1e-4 * a for a, b in pairs)


def test_the_builtin_model_recomputes_inside_python(tmp_path: Path) -> None:
    # A region in C++ whose saved-tensor hooks are Python's.
    run_file = {
        "model": {"layers": 2, "width": 32, "heads": 2, "sequence_length": 32},
        "data": {"train": [str(ROOT / "docs")], "suffix": ".md"},
        "train": {"output_dir": "out", "max_updates": 3, "validation_batches": 0},
    }
    (tmp_path / "run.json").write_text(json.dumps(run_file))
    losses = []
    for policy in ("none", "every_n", "selective"):
        done = run("train", "run.json", "--set", f"checkpointing.policy={policy}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(lines[-1])["losses"])
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 3


def test_errors_are_one_line_and_a_code(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"optimiser": {}}')
    done = run("train", tmp_path / "run.json")
    assert done.returncode == 1
    assert "optimizer" in done.stderr and "Traceback" not in done.stderr
    assert run("no-such-command").returncode == 2


def test_a_budget_that_is_too_small_is_in_the_summary(tmp_path: Path) -> None:
    run_file = {
        "model": {"layers": 2, "width": 64, "heads": 2, "sequence_length": 64},
        "data": {"train": [str(ROOT / "docs")], "suffix": ".md"},
        "batch": {"micro_batch_size": 64},
        "memory": {"budget_bytes": "8MiB"},
        "train": {"output_dir": str(tmp_path / "out"), "max_updates": 2},
    }
    (tmp_path / "run.json").write_text(json.dumps(run_file))
    done = run("train", tmp_path / "run.json")
    assert done.returncode == 1
    assert "out of memory" in done.stderr
    summary = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "out of memory" in summary["error"]
