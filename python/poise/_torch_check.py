"""Refuses a torch that this poise was not built with, before the extension module is loaded.

Loading C++ code built against another torch ends in undefined symbols or worse, so the versions are
compared first.
"""

from __future__ import annotations

REBUILD = (
    "pip install . --no-build-isolation --force-reinstall --no-deps (in poise's source folder)"
)


def release_of(version: str) -> str:
    """Drops the build tag: 2.11.0+cu130 and 2.11.0 are the same release."""
    return version.split("+", 1)[0]


def check_torch(
    built_with: str, running: str, *, built_with_cuda: bool = False, running_cuda: str | None = None
) -> None:
    """Raises ImportError where poise cannot run under this torch.

    Args:
      built_with: release of the torch that poise was compiled against.
      running: torch.__version__ of this process.
      built_with_cuda: whether poise holds CUDA kernels, which need torch's CUDA libraries.
      running_cuda: torch.version.cuda of this process; None for a CPU build.
    """
    if release_of(running) != release_of(built_with):
        raise ImportError(
            f"[poise] poise was built with torch {built_with} and is imported under "
            f"torch {running}; install torch {built_with}, or rebuild: {REBUILD}"
        )
    if built_with_cuda and running_cuda is None:
        raise ImportError(
            f"[poise] poise was built with CUDA kernels (torch {built_with}) and is imported under "
            f"torch {running}, a CPU build; rebuild: {REBUILD}"
        )
