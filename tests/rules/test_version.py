"""The version is said once, in CMakeLists.txt; everything else follows it."""

from __future__ import annotations

import re

import poise
from poise import _build
from sources import ROOT


def cmake_version() -> str:
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(poise VERSION ([0-9.]+)", text).group(1)


def test_package_has_the_version_of_cmake():
    assert poise.__version__ == _build.version == cmake_version()


def test_pyproject_reads_it_from_cmake():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text
    pattern = re.search(r"^regex = '(.*)'$", text, re.MULTILINE).group(1)
    found = re.search(pattern, (ROOT / "CMakeLists.txt").read_text())
    assert found.group("value") == cmake_version()


def test_changelog_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[?{re.escape(cmake_version())}\b", text, re.MULTILINE), (
        "add its heading"
    )


def test_built_torch_is_in_the_declared_range():
    text = (ROOT / "cmake" / "torch.cmake").read_text()
    low, high = (
        re.search(rf'set\(POISE_TORCH_{end} "([0-9.]+)"\)', text).group(1) for end in ("MIN", "MAX")
    )
    numbers = [tuple(map(int, v.split("."))) for v in (low, _build.torch_version, high)]
    assert numbers[0] <= numbers[1] < numbers[2]
