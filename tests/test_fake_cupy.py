"""The CUDA backend's own code, run without a GPU: pytest processes with the fake CuPy in them.

They are processes of their own because our modules keep what they imported. Their results are
those of ``tests/cuda`` and of every test elsewhere that is marked as needing GPUs.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from early import ROOT, environment

# The fake keeps a clock for every use of memory, and counts of those grow.
DESELECTED = "tests/device/test_contract_lifetime.py::test_nothing_grows_with_use"
SHARED = "(gpu or multi_gpu) and not slow"
OWN = "not slow"


def run(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(**changed),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def passes(*arguments: str, **changed: str) -> None:
    passed(run("-m", "pytest", "-p", "fake_cupy.plugin", "-q", *arguments, **changed))


def passed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    counted = done.stdout.strip().splitlines()[-1]
    assert " passed" in counted, counted
    assert "skipped" not in counted, counted


@pytest.mark.repo
@pytest.mark.host
@pytest.mark.slow
@pytest.mark.early("-m", "pytest", "-p", "fake_cupy.plugin", "-q", "tests/cuda", "-m", OWN)
def test_the_cuda_backend_passes_on_the_fake(early):
    """In one process: to start one for each file took longer than most of them."""
    passed(early)


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "2"])  # fully lazy; as chance will have it
def test_tests_that_need_gpus_pass_on_the_fake(seed):
    passes("tests/device", "-m", SHARED, "--deselect", DESELECTED, GRADREDUCE_FAKE_SEED=seed)


@pytest.mark.host
def test_a_fault_fails_a_test(tmp_path):
    test = tmp_path / "test_unordered.py"
    test.write_text(
        "from gradreduce.device import open_mesh\n"
        "from gradreduce import ops\n"
        "def test_it():\n"
        "    with open_mesh([0, 0], backend='cuda') as mesh:\n"
        "        first, second = (device.zeros((4,), 'float32') for device in mesh.devices)\n"
        "        ops.add_n([first], [[second]])\n"
        "def test_the_next_one_has_a_new_machine():\n"
        "    with open_mesh(1, backend='cuda') as mesh:\n"
        "        assert (mesh.devices[0].zeros((4,), 'float32').numpy() == 0).all()\n",
        encoding="utf-8",
    )
    done = run("-m", "pytest", "-p", "fake_cupy.plugin", "-q", str(test))
    assert done.returncode == 1, done.stdout
    assert "Fault: unordered: " in done.stdout
    assert "1 failed, 1 passed, 1 error" in done.stdout


def test_the_record_is_that_of_the_installed_cupy():
    """Where CuPy is installed; without a GPU too."""
    if importlib.util.find_spec("cupy") is not None:
        done = run("-m", "fake_cupy.signatures")
        assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_plugin_only_what_needs_gpus_is_collected():
    rest = "not gpu and not multi_gpu"
    done = run("-m", "pytest", "-q", "--collect-only", "tests/cuda", "-m", rest)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
