"""Runs Python on the pretend GPU of the build (tests/pretend_gpu/pretend_gpu.h):

    python python/tests/pretend_gpu.py SCRIPT ARGUMENTS...
    python python/tests/pretend_gpu.py -m pytest python/tests/test_engine.py

PRETEND_GPU_DEVICES=2 in the environment: with two of them. PRETEND_GPU_SEED=1: some of what is queued
on a stream happens early, by chance.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = "PRETEND_GPU"  # in the environment of a process that runs on it
SECONDS = 240  # a process that takes longer hangs


def built() -> Path:
    """Where the libraries lie, if this build has them."""
    import poise

    return Path(poise.__file__).absolute().parent.parent.parent / "tests" / "pretend_gpu"


def missing() -> str | None:
    """Why tests on it cannot run; None: they can."""
    if (built() / "libpretend_gpu.so").exists():
        return None
    return f"no pretend GPU in {built()}: a build has one with CUDA kernels (POISE_CUDA) and tests"


def environment(seed: int | None = None, devices: int | None = None) -> dict[str, str]:
    """For a process on the pretend GPU. By a seed some of what is queued happens early."""
    folder = built()
    libraries = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    said = {
        FOLDER: str(folder),
        "LD_PRELOAD": str(folder / "libpretend_gpu.so"),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    if seed is not None:
        said["PRETEND_GPU_SEED"] = str(seed)
    if devices is not None:
        said["PRETEND_GPU_DEVICES"] = str(devices)
    return {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | said


def environment_of_programs() -> dict[str, str]:
    """For one that is not Python: torch's operators run on it from the start."""
    said = environment()
    cuda = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"  # has operators of its own
    operators = Path(said[FOLDER], "libpretend_gpu_operators.so")
    said["LD_PRELOAD"] = os.pathsep.join([said["LD_PRELOAD"], str(cuda), str(operators)])
    return said


def switch_on() -> None:
    """In such a process: torch's operators run on it from now on."""
    torch.ops.load_library(os.path.join(os.environ[FOLDER], "libpretend_gpu_operators.so"))
    # What has no counterpart on the CPU.
    torch.backends.cudnn.enabled = False
    torch.cuda._device_count_nvml = lambda: (
        -1
    )  # asks a driver how many there are, where there is one
    torch.set_num_threads(1)  # the same bits as the CPU that it is compared with


def run(script: str, folder: Path, **how: Any) -> dict[str, Any]:
    """What each case of a script of this folder returned. Its lines go to the standard error."""
    command = [sys.executable, __file__, str(Path(__file__).parent / script), str(folder)]
    subprocess.run(command, env=environment(**how), check=True, timeout=SECONDS)
    seen = {}
    for file in folder.glob("*.json"):
        result = json.loads(file.read_text())
        assert "raised" not in result, f"{file.stem}: {result['raised']}"
        seen[file.stem] = result["value"]
    return seen


def run_cases(cases: list[Callable[[Path], Any]]) -> None:
    """In the script: each case gets a folder of its own."""
    for case in cases:
        folder = Path(sys.argv[1], case.__name__)
        folder.mkdir()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                seen = {"value": case(folder)}
            except Exception:
                seen = {"raised": traceback.format_exc()}
        folder.with_suffix(".json").write_text(json.dumps(seen))


def main() -> None:
    if FOLDER not in os.environ:
        os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], environment())
    switch_on()
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
