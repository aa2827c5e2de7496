"""The command `poise`: the C++ command line reached from Python, with the codes it promises."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import poise
import pytest
from poise import cli

ROOT = Path(__file__).parents[2]
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(poise.__file__)))


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "poise", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": PACKAGE}  # found from any folder
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment
    )


def test_version_and_help() -> None:
    assert poise.__version__ in run("--version").stdout
    text = run("--help").stdout
    assert all(command in text for command in ("train", "config", "doctor", "bench", "demo"))


def test_every_command_has_a_help_of_its_own(capfd: pytest.CaptureFixture) -> None:
    assert cli.main(["--help"]) == 0
    text = capfd.readouterr().out
    rows = re.findall(r"^  (\w+)( {2,})\S.*$", text.split("Subcommands:")[1], re.M)
    names = [name for name, _ in rows]
    assert names == ["train", "plan", "inspect", "config", "doctor", "bench", "report", "demo"]
    # One table, whichever language a command is in.
    assert len({len(name) + len(spaces) for name, spaces in rows}) == 1
    words = {
        "train": "module:function",
        "plan": "--global-batch",
        "inspect": "--export",
        "config": "--reference",
        "doctor": "instruction sets",
        "bench": "step_vs_torch",
        "report": "metrics.jsonl",
        "demo": "report.html",
    }
    for name in names:
        with contextlib.suppress(SystemExit):  # argparse's way
            assert cli.main([name, "--help"]) == 0
        shown = capfd.readouterr()
        assert words[name] in shown.out and f"poise {name}" in shown.out and shown.err == ""


def test_help_keeps_its_order_in_a_pipe() -> None:
    # C++ and Python print through buffers of their own.
    text = run("--help").stdout
    assert text.index("Usage") < text.index("doctor") < text.index("of the Python package")
    assert run("train", "--help").stdout.rstrip().endswith("trains a model of Python.")


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "bench --help",
        "report --help",
        "train --help",
        "config --reference",
        "doctor --help",
    ],
)
def test_a_command_whose_reader_has_gone_ends_without_a_word(arguments: str) -> None:
    command = [sys.executable, "-m", "poise", *arguments.split()]
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **ends) as process:
        process.stdout.close()
        process.stdout = None
        assert process.communicate(timeout=300)[1] == ""
    assert process.returncode in (0, cli.READER_GONE)


def test_another_pipe_that_broke_is_no_reader_that_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(_: object) -> int:
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(cli, "_run", breaks)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        cli.main(["bench"])


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
        "train": {
            "output_dir": str(tmp_path / "out"),
            "max_updates": 3,
            "validation_batches": 0,
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(run_file))
    losses = []
    for policy in ("none", "every_n", "selective"):
        settings = ["--set", f"checkpointing.policy={policy}"]
        assert cli.main(["train", str(tmp_path / "run.json"), *settings]) == 0
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


def with_instruction_set(name: str, *arguments: object) -> subprocess.CompletedProcess:
    """The command in a process of its own, which says what its kernels were compiled for."""
    code = (
        "import sys\nfrom poise import _C, cli\ncode = cli.main(sys.argv[1:])\n"
        "print('kernels:', _C.cpu_isa() if code == 0 else None)\nsys.exit(code)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": PACKAGE, "POISE_CPU_ISA": name, "OMP_NUM_THREADS": "1"},
    )


def test_every_instruction_set_trains_to_the_same_bits(tmp_path: Path) -> None:
    run_file = {
        "model": {"layers": 2, "width": 24, "heads": 2, "sequence_length": 19},
        "data": {"train": [str(ROOT / "docs")], "suffix": ".md"},
        "batch": {"micro_batch_size": 3, "accumulation": 2},
        "precision": {"dtype": "bf16", "parameters": "bf16"},
        "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5},
        "train": {"output_dir": str(tmp_path / "out"), "max_updates": 8, "log_every": 1},
    }
    (tmp_path / "run.json").write_text(json.dumps(run_file))
    refused = with_instruction_set("avx3", "train", tmp_path / "run.json")
    assert refused.returncode == 1 and "'avx3'" in refused.stderr
    names = re.search(r"use one of: (.*), or unset it", refused.stderr).group(1).split(", ")
    assert names[0] == "baseline"
    runs = []
    for name in names:
        done = with_instruction_set(name, "train", tmp_path / "run.json")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"kernels: {name}"
        lines = [json.loads(t) for t in (tmp_path / "out" / "metrics.jsonl").open()]
        runs.append([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
        assert len(runs[-1]) == 8 and runs[-1][-1] < runs[-1][0]
    assert all(run == runs[0] for run in runs)
