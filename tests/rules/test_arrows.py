"""Holds the arrows of docs/architecture.md: which room may include which, and who stays torch-free."""

from __future__ import annotations

from pathlib import Path

import pytest
from sources import cpp_files, includes, resolve

# Room -> the rooms whose headers it may include besides its own, config's and the base (errors, log,
# export, interrupt, names of accounts). Arrows go one way; rooms of the middle row are strangers.
_BELOW_ENGINE = {
    "data",
    "checkpointing",
    "zero",
    "optim",
    "precision",
    "memory",
    "offload",
    "comm",
    "core",
    "plan",
    "state",
}
ARROWS = {
    "base": set(),
    "kernels": set(),
    "config": set(),
    "plan": set(),
    "core": set(),
    "memory": {"core"},
    "offload": {"core"},
    "comm": {"core", "kernels"},
    "optim": {"core", "memory", "kernels"},
    "precision": {"core", "memory", "kernels"},
    "zero": {"core", "memory", "offload", "comm", "kernels"},
    "checkpointing": {"core", "memory", "offload"},
    "data": {"core", "memory"},
    "state": {"core", "memory", "offload", "comm"},
    "engine": _BELOW_ENGINE,
    "faces": {"engine", "checkpointing", "comm", "core"},
    "cli": _BELOW_ENGINE | {"engine"},
    "python": _BELOW_ENGINE | {"engine", "cli", "kernels"},
}
# Single files that others may see, each with its reason.
DOORS = {
    # `poise doctor` names the instruction sets.
    ("cli", "kernels/isa.h"),
    # How a kernel is told where to run; core makes one from torch's threads for all rooms.
    ("core", "kernels/launch.h"),
    # Checksums of blocks and files, which state takes from offload; compiled for each instruction set.
    ("offload", "kernels/digest.h"),
    # Text only; unknown keys name the nearest known one, as unknown parameters do.
    ("config", "src/core/nearest_name.h"),
    # Whole numbers only; the planner counts collectives and their memory by the rule that makes them.
    ("plan", "src/zero/bucket_rule.h"),
}
BASE = {
    "error.h",
    "export.h",
    "log.h",
    "interrupt.h",
    "out_of_memory.h",
    "memory_accounts.h",
    "version.h",
}
FURTHER_DOORS = {  # rooms with two doors
    "stream.h": "core",
    "best_save.h": "state",
    "model_files.h": "state",
    "window_dropped.h": "engine",
    "module_plan.h": "engine",
}
TORCH_FREE = ("base", "config", "kernels", "plan")
TORCH = ("ATen/", "torch/", "c10/", "caffe2/")


def room_of(name: Path) -> str | None:
    """The room a file belongs to; None for poise.h and the precompiled header, which serve all."""
    if name.parts[0] == "kernels":
        return "kernels"
    if name.parts[0] == "python":
        return "python"
    if name.parts[0] == "src":
        return name.parts[1] if len(name.parts) > 2 else None
    if name.name in BASE:
        return "base"
    return None if name.stem == "poise" else FURTHER_DOORS.get(name.name, name.stem)


def our_files() -> list[Path]:
    return [n for n in cpp_files("include", "src", "kernels", "python") if "tests" not in n.parts]


def allowed(room: str, target_room: str, target: Path) -> bool:
    if target_room in (room, "base"):
        return True
    if room in ("base", "kernels"):
        return False  # nothing of ours above them
    return (
        target_room == "config" or target_room in ARROWS[room] or (room, target.as_posix()) in DOORS
    )


def wrong_arrows(name: Path) -> list[str]:
    room = room_of(name)
    if room is None:
        return []
    wrong = []
    for _, included in includes(name):
        target = resolve(name, included)
        target_room = room_of(target) if target else None
        if target and target.name == "poise.h":
            target_room = "engine"  # it re-exports the engine
        if target_room and not allowed(room, target_room, target):
            wrong.append(f"{name} ({room}) includes {target} ({target_room})")
    return wrong


def test_every_room_is_in_the_table():
    rooms = {room_of(name) for name in our_files()} - {None}
    assert rooms <= set(ARROWS), f"add to ARROWS and docs/architecture.md: {rooms - set(ARROWS)}"


def test_includes_follow_the_arrows():
    wrong = [line for name in our_files() for line in wrong_arrows(name)]
    assert not wrong, "\n".join(wrong)


def reached(name: Path, seen: set[Path]) -> set[Path]:
    """The file and everything of ours that it includes."""
    if name not in seen:
        seen.add(name)
        for _, included in includes(name):
            target = resolve(name, included)
            if target:
                reached(target, seen)
    return seen


def test_torch_free_rooms_stay_torch_free():
    wrong = []
    for name in our_files():
        if room_of(name) not in TORCH_FREE:
            continue
        for source in reached(name, set()):
            wrong += [
                f"{name} reaches {i} by {source}"
                for _, i in includes(source)
                if i.startswith(TORCH)
            ]
    assert not wrong, "\n".join(wrong)


def test_public_headers_include_only_public_headers():
    wrong = []
    for name in cpp_files("include"):
        for mark, included in includes(name):
            target = resolve(name, included) if mark == '"' else None
            if mark == '"' and (target is None or target.parts[0] != "include"):
                wrong.append(f"{name} includes {included}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "included", "fine"),
    [
        ("src/optim/adamw.cpp", "kernels/launch.h", True),
        ("src/optim/adamw.cpp", "poise/precision.h", False),  # sideways
        ("src/memory/ledger.cpp", "poise/engine.h", False),  # upwards
        ("src/comm/group.cpp", "poise/memory.h", False),
        ("src/zero/flat_store.cpp", "poise/offload.h", True),
        ("src/offload/span.cpp", "poise/optim.h", False),
        ("src/core/launch.cpp", "kernels/launch.h", True),  # a named door
        ("src/engine/engine.cpp", "poise/config.h", True),
        ("kernels/doors.cpp", "poise/error.h", True),
        ("kernels/doors.cpp", "poise/config.h", False),
    ],
)
def test_the_rule_itself_can_fail(name, included, fine):
    path = Path(name)
    target = resolve(path, included)
    assert target is not None
    assert allowed(room_of(path), room_of(target), target) is fine
