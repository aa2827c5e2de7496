"""Runs a script with --local_rank=N in front of its arguments, as DeepSpeed's launcher does:
`python -m poise.deepspeed.local_rank train.py ...`, N from the environment that torchrun made."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    script, *arguments = sys.argv[1:]
    sys.argv = [script, f"--local_rank={os.environ.get('LOCAL_RANK', 0)}", *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
