"""The ways poise gets to its users: pip, cmake --install, a source tree inside another project.

Every build here is a real one, in a folder of its own at the depth of build/cpu, so that ccache
gives back the objects that are compiled with the same flags: POISE_DEVELOPER (warnings are errors,
no other code) and POISE_PCH are on for that reason, and only the targets needed are built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from poise import _build

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
TORCH = Path(pytest.importorskip("torch").__file__).parent
TOOLS = (
    "cmake ninja ccache cc gcc c++ g++ as ld ld.bfd ar nm objcopy ranlib strip "
    "sh bash env uname rm ldd cat"
)
SLOPPINESS = "pch_defines,time_macros,include_file_mtime,include_file_ctime"
JOBS = str(os.cpu_count() or 2)


def run(*command, cwd=ROOT, fails=False, **environment):
    """Runs a command and gives its output; it must succeed, or with `fails` must not."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment whose PATH holds compilers and cmake, and neither python nor nvcc."""
    folder = tmp_path_factory.mktemp("bin")
    search = "/usr/bin:/bin:" + os.environ["PATH"]  # the system's cmake: pip's is a Python script
    for tool in TOOLS.split():
        found = shutil.which(tool, path=search)
        if found:
            (folder / tool).symlink_to(found)
    assert (
        shutil.which("python3", path=folder) is None and shutil.which("nvcc", path=folder) is None
    )
    hidden = dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "VIRTUAL_ENV"), "")
    return {
        **hidden,
        "PATH": str(folder),
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_SLOPPINESS": SLOPPINESS,
    }


@pytest.fixture(scope="module")
def installed(bare, tmp_path_factory):
    """A prefix with poise built without Python against a LibTorch tree."""
    build, prefix = BUILD / "no_python", tmp_path_factory.mktemp("prefix")
    run("cmake", "--fresh", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DPOISE_DEVELOPER=ON", "-DPOISE_PYTHON=OFF", f"-DPOISE_TORCH_ROOT={TORCH}", **bare)  # fmt: skip
    targets = ["poise"]
    if "poise_cli" in run("cmake", "--build", build, "--target", "help", **bare):
        targets.append("poise_cli")
    run("cmake", "--build", build, "--parallel", JOBS, "--target", *targets, **bare)
    run("cmake", "--install", build, "--prefix", prefix, **bare)
    return prefix


def test_install_has_the_documented_files(installed):
    for path in ("include/poise/poise.h", "lib/libpoise.so", "lib/cmake/poise/poiseConfig.cmake"):
        assert (installed / path).exists(), path


@pytest.mark.parametrize("file", ["lib/libpoise.so", "bin/poise"])
def test_library_and_program_need_no_python(installed, bare, file):
    needed = run("ldd", installed / file, **bare)
    assert "libtorch_cpu.so" in needed and "not found" not in needed
    assert "libpython" not in needed and "libtorch_python" not in needed


def test_consumer_of_the_install(installed, bare, tmp_path):
    source = ROOT / "tests" / "packaging" / "consumer"
    run("cmake", "-S", source, "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={installed}",
        f"-DPOISE_TORCH_ROOT={TORCH}", **bare)  # fmt: skip
    run("cmake", "--build", tmp_path, **bare)
    assert run(tmp_path / "consumer", cwd="/").strip() == "[consumer] sum 6"
    assert "libpython" not in run("ldd", tmp_path / "consumer", **bare)


def fake_torch(folder: Path, version: str) -> Path:
    header = folder / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text(f'#define TORCH_VERSION \\\n  "{version}"\n')
    return folder


def test_consumer_with_another_torch_is_refused(installed, tmp_path):
    torch = fake_torch(tmp_path / "torch", "2.11.7")
    output = run("cmake", "-S", ROOT / "tests/packaging/consumer", "-B", tmp_path / "b", "-G", "Ninja",
                 f"-DCMAKE_PREFIX_PATH={installed}", f"-DPOISE_TORCH_ROOT={torch}", fails=True)  # fmt: skip
    output = " ".join(output.split())
    assert f"built with torch {_build.torch_version}, and torch 2.11.7 was found" in output


def test_torch_outside_the_range_is_refused_at_configure(tmp_path):
    torch = fake_torch(tmp_path / "torch", "2.9.0")
    output = run("cmake", "-S", ROOT, "-B", tmp_path / "b", "-G", "Ninja", f"-DPOISE_TORCH_ROOT={torch}",
                 fails=True)  # fmt: skip
    output = " ".join(output.split())
    assert "torch 2.9.0 found" in output and "needs >= 2.11.0, < 2.12.0" in output


def test_missing_torch_is_named_at_configure(tmp_path):
    output = run("cmake", "-S", ROOT, "-B", tmp_path / "b", "-G", "Ninja",
                 f"-DPOISE_TORCH_ROOT={tmp_path}", fails=True)  # fmt: skip
    assert "no LibTorch found" in output and "POISE_TORCH_ROOT" in output


@pytest.mark.rebuild
def test_source_tree_inside_another_project(bare):
    build = BUILD / "fetch"
    run("cmake", "-S", ROOT / "tests" / "packaging" / "fetch", "-B", build, "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release", "-DPOISE_PCH=ON", "-DPOISE_DEVELOPER=OFF",
        "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache" if shutil.which("ccache") else "-DPOISE_INSTALL=OFF",
        f"-DPOISE_TORCH_ROOT={TORCH}", **bare)  # fmt: skip
    run("cmake", "--build", build, "--parallel", JOBS, "--target", "consumer", **bare)  # fmt: skip
    assert run(build / "consumer", cwd="/").strip() == "[consumer] sum 6"


@pytest.fixture(scope="module")
def wheel_site(tmp_path_factory):
    """A folder that pip installed poise into, beside the torch of this environment."""
    site = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", ROOT, "--no-build-isolation", "--no-deps", "--quiet",
        "--target", site, "--config-settings=build-dir=build/wheel_test",
        "--config-settings=cmake.define.POISE_DEVELOPER=ON",
        "--config-settings=build.targets=poise_extension",
        CCACHE_BASEDIR=str(ROOT), CMAKE_BUILD_PARALLEL_LEVEL=JOBS, PYTHONPATH="")  # fmt: skip
    return site


@pytest.mark.rebuild
def test_pip_install_gives_the_package(wheel_site, tmp_path):
    code = "import poise; print(poise.__version__, poise.__file__)"
    version, path = run(
        sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(wheel_site)
    ).split()
    assert version == _build.version
    assert Path(path).parent == wheel_site / "poise"
    assert (wheel_site / "poise" / "py.typed").exists()


@pytest.mark.rebuild
def test_pip_install_gives_the_command(wheel_site, tmp_path):
    command = wheel_site / "bin" / "poise"
    assert command.exists()
    run(command, "--version", cwd=tmp_path, PYTHONPATH=str(wheel_site))
    run_file = '{"data": {"train": ["text.txt"]}, "model": {"layers": 2, "sequence_length": 32}, '
    run_file += '"train": {"max_updates": 2, "validation_batches": 0}}'
    (tmp_path / "run.json").write_text(run_file)
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    trained = run(command, "train", "run.json", cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert "update 2/2" in trained
    entry = (wheel_site / f"poise-{_build.version}.dist-info" / "entry_points.txt").read_text()
    assert "poise = poise.cli:main" in entry or "poise=poise.cli:main" in entry


@pytest.mark.rebuild
def test_wheel_has_no_path_of_this_machine(wheel_site):
    for library in (wheel_site / "poise").glob("*.so*"):
        paths = run("readelf", "-d", library)
        runpath = [line for line in paths.splitlines() if "RUNPATH" in line or "RPATH" in line]
        assert runpath and all("$ORIGIN" in line and str(ROOT) not in line for line in runpath)
