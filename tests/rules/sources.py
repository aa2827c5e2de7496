"""The files of the repository that the rules look at."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPP = (".h", ".cpp", ".cu", ".cuh")
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)


@functools.cache
def files() -> tuple[Path, ...]:
    """Tracked files and new ones that git does not ignore; in a tree without git, all of it."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\0")  # fmt: skip
        names = [Path(name) for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        names = [name for name in names if name.parts[0] not in ("build", "out", ".venv", ".git")]
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


def cpp_files(*folders: str) -> list[Path]:
    return [name for name in files() if name.suffix in CPP and name.parts[0] in folders]


def includes(name: Path) -> list[tuple[str, str]]:
    """Pairs of the opening mark (" or <) and what is included."""
    return _INCLUDE.findall((ROOT / name).read_text(encoding="utf-8"))


def resolve(name: Path, included: str) -> Path | None:
    """The file of ours that an include means, searched as the compiler does; None for others'."""
    for base in (name.parent, Path("include"), Path("src"), Path("."), Path("python/src")):
        candidate = (ROOT / base / included).resolve()
        if candidate.is_file() and candidate.is_relative_to(ROOT):
            return candidate.relative_to(ROOT)
    return None
