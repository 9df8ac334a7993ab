"""The CUDA backend's own code, run without a GPU: pytest processes with the fake CuPy in them.

They are separate processes because our modules keep what they imported. They run the tests that are
marked as needing GPUs, or the fake.
"""

import importlib.util
import subprocess
import sys

import pytest
from support.background_runs import ROOT, environment

# The fake stores a clock for every use of memory, and the number of uses grows.
DESELECTED = "tests/device/test_contract_lifetime.py::test_memory_does_not_grow_with_use"
PYTEST = ("-m", "pytest", "-p", "fake_cupy.plugin", "-q")
MARKED = "(gpu or multi_gpu or fake_cupy)"
PLAIN = f"{MARKED} and not slow"
TESTS = ROOT / "tests"
FILES = [
    str(TESTS / name)
    for name in (
        "backends/cuda",
        "end_to_end/test_compiled_first.py",
        "end_to_end/test_legal_orders.py",
        "end_to_end/test_steady_state.py",
        "reduce/test_arrays_in_place.py",
        "reduce/test_profile.py",
    )
]


def on_seed(seed: str, *marks: pytest.MarkDecorator):
    """A parameter: the tests that need GPUs, on a machine of this seed."""
    arguments = (*PYTEST, str(TESTS / "device"), "-m", PLAIN, "--deselect", DESELECTED)
    early = pytest.mark.early(*arguments, GRADREDUCE_FAKE_SEED=seed)
    return pytest.param(marks=(early, *marks), id=seed)


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


@pytest.mark.repo
@pytest.mark.host
@pytest.mark.slow
@pytest.mark.early(*PYTEST, *FILES, "-m", PLAIN)
def test_the_cuda_backend_passes_on_the_fake(early):
    """In one process, because starting one for each file took longer than most of the files."""
    early.check_passed()


@pytest.mark.repo
@pytest.mark.host
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.early(*PYTEST, *FILES, "-m", f"{MARKED} and (exhaustive or slow)")
def test_what_a_plain_run_leaves_out_passes_on_the_fake_too(early):
    early.check_passed()


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize((), [on_seed("2"), on_seed("0", pytest.mark.exhaustive)])
def test_tests_that_need_gpus_pass_on_the_fake(early):
    """With random orders, and as lazily as possible."""
    early.check_passed()


@pytest.mark.host
def test_a_fault_fails_a_test(tmp_path):
    test = tmp_path / "test_unordered.py"
    test.write_text(
        "from gradreduce.backends import open_mesh\n"
        "def test_it():\n"
        "    with open_mesh([0, 1], backend='cuda') as mesh:\n"
        "        first, second = (device.zeros((4,), 'float32') for device in mesh.devices)\n"
        "        mesh.devices[0]._copy(first, second, 'compute')  # without the order's waits\n"
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
    """If CuPy is installed, also without a GPU."""
    if importlib.util.find_spec("cupy") is not None:
        done = run("-m", "fake_cupy.signatures")
        assert done.returncode == 0, done.stdout + done.stderr
