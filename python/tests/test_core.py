"""Errors and log lines of the core as Python sees them, and the check of torch's version."""

import logging
import subprocess
import sys

import poise
import pytest
import torch
from poise import _C, _build
from poise._torch_check import check_torch


def test_error_is_a_runtime_error_of_poise():
    assert issubclass(poise.Error, RuntimeError)
    assert poise.Error.__module__ == "poise"
    with pytest.raises(poise.Error, match=r"\[log\] unknown level: loud; use debug"):
        _C.set_log_level("loud")


def test_bug_is_not_an_error():
    assert not issubclass(poise.Bug, poise.Error)


def test_log_lines_reach_python_logging(caplog):
    with caplog.at_level(logging.INFO, logger="poise"):
        _C.log_write(1, "100% of it")
        _C.log_write(2, "careful")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "100% of it"),
        ("WARNING", "careful"),
    ]


def test_failing_log_handler_is_reported_and_does_not_raise(monkeypatch):
    class Failing(logging.Handler):
        def emit(self, record):
            raise ValueError("broken handler")

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: reported.append(str(info.exc_value)))
    logger = logging.getLogger("poise")
    handler = Failing()
    logger.addHandler(handler)
    try:
        _C.log_write(2, "line")
    finally:
        logger.removeHandler(handler)
    assert reported == ["broken handler"]


def test_built_torch_is_this_torch():
    assert torch.__version__.split("+")[0] == _build.torch_version


def test_another_torch_is_refused_with_both_versions():
    with pytest.raises(
        ImportError, match=r"built with torch 2\.11\.0 .*under torch 2\.9\.1\+cpu.*pip install"
    ):
        check_torch("2.11.0", "2.9.1+cpu")
    check_torch("2.11.0", "2.11.0+cu130")


def test_cuda_build_needs_a_cuda_torch():
    with pytest.raises(ImportError, match="CPU build"):
        check_torch("2.11.0", "2.11.0+cpu", built_with_cuda=True, running_cuda=None)
    check_torch("2.11.0", "2.11.0+cu130", built_with_cuda=True, running_cuda="13.0")


def test_import_under_another_torch_fails_before_the_extension_is_loaded():
    code = (
        "import sys, torch; torch.__version__ = '2.12.1'\n"
        "try:\n    import poise\n"
        "except ImportError as e:\n"
        "    assert '2.12.1' in str(e) and 'poise._C' not in sys.modules; print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "refused", done.stderr
