"""poise on CUDA without a GPU: on the pretend one, whose own traps are tested first.

What this shows: which code runs on CUDA, that it waits where it must, that memory of the device is
touched by kernels alone, that results are those of the CPU to the bit. What it does not: kernels.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pretend_gpu
import pretend_gpu_parity
import pytest

pytestmark = pytest.mark.skipif(
    pretend_gpu.missing() is not None, reason=str(pretend_gpu.missing())
)


@pytest.fixture(scope="module")
def itself(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pretend_gpu.run("pretend_gpu_itself.py", tmp_path_factory.mktemp("itself"), devices=2)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pretend_gpu.run("pretend_gpu_cases.py", tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module", params=[None, 1], ids=["late", "by chance"])
def parity(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parity")
    return pretend_gpu.run("pretend_gpu_parity.py", folder, seed=request.param)["parity"]


# The pretend GPU itself.


def test_host_code_that_touches_the_device_is_killed() -> None:
    code = (
        "import ctypes, pretend_gpu; pretend_gpu.switch_on(); import torch;"
        "x = torch.ones(4, device='cuda'); assert x.sum().item() == 4; print('touches', flush=True);"
        "ctypes.string_at(x.data_ptr(), 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=pretend_gpu.environment(), timeout=pretend_gpu.SECONDS,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("touches\n", -signal.SIGSEGV)


def test_copies_come_as_late_as_the_program_lets_them(itself: dict[str, Any]) -> None:
    assert itself["copy_arrives_with_its_event"] == [0, 1024]
    assert itself["copy_arrives_where_it_is_asked_for"] == 1024
    assert itself["pageable_copy_is_there_at_once"] == 1024


def test_missing_waits_show(itself: dict[str, Any]) -> None:
    assert itself["kernel_before_its_input"] == [0, 1024], "without and with the wait"
    assert itself["host_memory_written_too_early"] == 2


def test_memory_freed_too_early_shows(itself: dict[str, Any]) -> None:
    (reused, late), (reused_after_recording, recorded) = itself["device_memory_freed_too_early"]
    assert reused and late == 3, "the copy reads what the next tensor wrote"
    assert not reused_after_recording and recorded == 1
    assert itself["unwritten_memory_is_nan"]


def test_random_numbers_are_those_of_the_gpu_s_generator(itself: dict[str, Any]) -> None:
    again, goes_on, cpu_is_untouched = itself["random_numbers_follow_the_seed"]
    assert again and not goes_on and cpu_is_untouched


def test_devices_do_not_mix(itself: dict[str, Any]) -> None:
    said = itself["devices_do_not_mix"]
    assert "one on cpu and one on cuda:0" in said["host"]
    assert "one on cuda:1 and one on cuda:0" in said["other device"]
    assert said["moved"] == ["cuda:1", 4, 8]


# poise on it.


@pytest.mark.parametrize("case", pretend_gpu_parity.cases())
def test_trains_as_the_cpu_does(case: str, parity: dict[str, Any]) -> None:
    """To the bit: losses, norms, statuses, loss scales, parameters and masters."""
    assert parity[case]["cuda"] == parity[case]["cpu"]


def test_a_model_is_given_back_to_where_each_of_its_tensors_was(cases: dict[str, Any]) -> None:
    inside, outside, kept = cases["goes_back_where_it_came_from"]
    assert inside == ["cuda", "cuda"] and outside == ["cpu", "cpu", "cuda"] and kept


def test_gradients_are_lent_wherever_they_are(cases: dict[str, Any]) -> None:
    """Read, and written, between begin_update() and step()."""
    seen = cases["gradients_are_lent"]
    assert len(seen) == 6 and all(one == seen["cpu, nothing"] for one in seen.values())


def test_every_account_is_that_of_the_cpu(cases: dict[str, Any]) -> None:
    """To the byte, where counts of tokens are on the GPU, too: numbers of the host count nowhere."""
    for name, seen in cases["memory_by_account"].items():
        assert seen["cuda"] == seen["cpu"], name
        assert seen["cpu"]["at_peak"]["activations"] > 0


def test_recompute_draws_the_same_dropout_again(cases: dict[str, Any]) -> None:
    seen = cases["recompute_with_dropout"]
    assert seen["every_n"] == seen["selective"] == seen["none"]


def test_saves_go_from_device_to_device(cases: dict[str, Any]) -> None:
    seen = cases["saves_go_between_devices"]
    assert seen == dict.fromkeys(seen, [True, True]) and len(seen) == 4


def test_saves_hold_the_generator_of_the_gpu(cases: dict[str, Any]) -> None:
    seen = cases["saves_hold_the_generator"]
    assert seen == {"same": True, "names": ["random@0:cpu", "random@0:cuda"]}


def test_a_save_in_flight_is_of_its_moment(cases: dict[str, Any]) -> None:
    assert cases["save_while_training_goes_on"] is True


def test_a_budget_runs_out_on_the_gpu(cases: dict[str, Any]) -> None:
    seen = cases["budget_runs_out"]
    assert "CUDA out of memory" in seen["said"] and "64.00 MiB allowed" in seen["said"]
    assert seen["updates"] == [0, 1], "the next window, a small one, trains"
    assert seen["held"] < 8 << 20, "nothing of the lost window is left"
    assert seen["limits"] == [False, True], "a limit is gone with whoever set it last"


def test_the_host_waits_at_the_end_of_a_window_alone(cases: dict[str, Any]) -> None:
    for name, (first, one, eight) in cases["host_waits"].items():
        assert one == eight, "no wait in a micro-batch"
        assert first == one + (name == "fp16"), "once a run fp16 reads the first count"
        assert one == 2, "norms and sums of stop 8"


def test_parameters_on_several_devices_are_refused(cases: dict[str, Any]) -> None:
    seen = cases["models_on_two_devices"]
    assert (
        "parameters on several devices: '1.weight' is on cpu, the first parameter on cuda:0"
        in (seen["said"])
    )
    assert seen["left"] == ["cuda:0", "cuda:0", "cpu", "cpu"], "the model stays as it was"


def test_host_memory_is_pinned(cases: dict[str, Any]) -> None:
    seen = cases["host_memory_is_pinned"]
    assert seen["needed"] <= seen["pinned"] <= 2 * seen["needed"] and seen["pageable"] == 0


def test_trainer_takes_the_gpu(cases: dict[str, Any]) -> None:
    for seen in cases["trainer"].values():
        assert seen["device"] == "cuda"
        first, last = seen["losses"]
        assert last < first / 4 and seen["evaluated"] < first / 4
        assert seen["saves"] == ["checkpoint-12", "checkpoint-24"]


def test_scripts_run_on_it_by_one_command(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, torch; print(sys.argv[1], torch.cuda.get_device_name())")
    said = subprocess.run(
        [sys.executable, pretend_gpu.__file__, str(script), "on"], capture_output=True, text=True,
        check=True, timeout=pretend_gpu.SECONDS,
    )  # fmt: skip
    assert said.stdout == "on Pretend GPU\n"


def test_what_files_hold_of_a_gpu_passes_through_pinned_memory() -> None:
    program = pretend_gpu.built() / "pretend_gpu_staged_test"
    said = subprocess.run(
        [program], env=pretend_gpu.environment_of_programs(), timeout=pretend_gpu.SECONDS,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert said.returncode == 0 and "[  PASSED  ] 2 tests." in said.stdout, said.stdout


def test_slow_files_do_not_wait_for_each_other_s_lock() -> None:
    script = Path(__file__).parent / "pretend_gpu_slow_files.py"
    slow = pretend_gpu.environment() | {"POISE_STREAM_DELAY": "200000"}
    subprocess.run(
        [sys.executable, pretend_gpu.__file__, str(script)], env=slow, check=True,
        timeout=pretend_gpu.SECONDS,
    )  # fmt: skip
