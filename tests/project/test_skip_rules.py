"""The rules for skips, tested on small suites that run with the plugin alone."""

import sys
import warnings
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from support import skip_rules as skips

pytest_plugins = ("pytester",)

MARKERS = """
[pytest]
markers =
    gpu: one device
    multi_gpu(n): n devices
    nccl: libnccl
    host: g++
    nvrtc(*wheels): the NVRTC wheel
"""

NO_GPU = (0, "ImportError: No module named 'cupy'")


@pytest.fixture
def suite(pytester, monkeypatch):
    """Runs a suite given as text, on a machine with ``gpus`` devices, and returns the result."""

    def run(text: str, *args: str, gpus: tuple[int, str] | None = NO_GPU) -> pytest.RunResult:
        if gpus is not None:
            monkeypatch.setattr(skips, "count_gpus", lambda: gpus)
        # Without third-party plugins, which could change the results; and runs start faster.
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        pytester.makeini(MARKERS + "filterwarnings = error\n")
        pytester.makepyfile("import pytest\n" + text)
        return pytester.runpytest_inprocess(
            "-p", "support.skip_rules", "-ra", "--strict-markers", *args
        )

    return run


FORBIDDEN = """
@pytest.mark.skip(reason="later")
def test_mark(): pass

@pytest.mark.skipif(True, reason="not here")
def test_condition(): pass

def test_body(): pytest.skip("in the body")

@pytest.fixture
def device(): pytest.skip("in a fixture")

def test_fixture(device): pass

@pytest.mark.parametrize("x", [])
def test_empty_parameter_set(x): pass

@pytest.mark.gpu
def test_marked_but_its_need_is_met(): pytest.skip("for another reason")

def test_passes(): pass
"""


def test_a_skip_of_its_own_fails_the_run(suite, pytester):
    result = suite(FORBIDDEN, gpus=(1, ""))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, skipped=6)
    result.stdout.fnmatch_lines(
        [
            "*forbidden skips*",
            "*::test_mark: Skipped: later",
            "*::test_condition: Skipped: not here",
            "*::test_body: Skipped: in the body",
            "*::test_fixture: Skipped: in a fixture",
            "*::test_empty_parameter_set*: Skipped: *",
            "*::test_marked_but_its_need_is_met: Skipped: for another reason",
            "The run FAILS: 6 skipped, *",
        ]
    )
    pytester.makepyfile(test_other="def test_b(): pass")
    result = suite("pytest.importorskip('no_such_module')\ndef test_a(): pass")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*forbidden skips*", "*could not import 'no_such_module'*"])


def test_marked_tests_skip_with_a_reason_and_are_counted(suite):
    result = suite(
        "@pytest.fixture\ndef device(): raise AssertionError('made before the need was checked')\n"
        "@pytest.mark.gpu\n@pytest.mark.parametrize('x', [1, 2])\ndef test_a(device, x): pass\n"
        "@pytest.mark.multi_gpu(2)\ndef test_b(): pass\n"
        "@pytest.mark.nccl\ndef test_c(): pass\n"
        "def test_d(): pass\n"
        "@pytest.mark.xfail(run=False)\ndef test_e(): pass\n"
        "@pytest.mark.xfail\ndef test_f(): assert False\n"
    )
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=4, xfailed=2)
    result.stdout.fnmatch_lines(
        [
            "allowed skips: gpu 2, multi_gpu 1, nccl 1",
            "SKIPPED [[]2[]] *gpu: no CUDA device (ImportError: *cupy*)",
        ]
    )


def marked(marks: Sequence[str]) -> str:
    """A suite with a test for each mark."""
    return "\n".join(
        f"@pytest.mark.{mark}\ndef test_{number}(): pass" for number, mark in enumerate(marks)
    )


@pytest.fixture
def cupy(monkeypatch):
    """Stands for CuPy: its number of devices, or its error, and whether it finds NCCL."""

    class Cuda:
        devices: int | Exception = 1
        has_nccl = True
        runtime = property(lambda self: self)

        def getDeviceCount(self) -> int:
            if isinstance(self.devices, Exception):
                raise self.devices
            return self.devices

        @property
        def nccl(self) -> SimpleNamespace:
            warnings.warn("NCCL could not be loaded", stacklevel=1)
            return SimpleNamespace(available=self.has_nccl, get_version=lambda: 22809)

    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return cuda


def test_require_gpu_without_a_gpu_ends_the_run(suite, cupy, pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("skip-ledger"), "these rules are those of our run"
    cupy.devices = RuntimeError("cudaErrorInsufficientDriver: too old\nand more")
    result = suite("def test_a(): pass", "--require-gpu", gpus=None)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *: no CUDA device (RuntimeError: cudaError*: too old)"])
    result.stdout.no_fnmatch_line("*passed*")
    cupy.devices = AssertionError("nobody asked")  # a run without tests of GPUs does not
    assert suite("def test_a(): pass", gpus=None).ret == pytest.ExitCode.OK


def test_nccl_must_run_or_fail_with_require_gpu(suite, cupy):
    text = "@pytest.mark.gpu\n" + marked(["nccl", "nccl(23000)"])
    found = suite(text, "--require-gpu", gpus=None)
    assert found.ret == pytest.ExitCode.OK
    found.assert_outcomes(passed=1, skipped=1)  # too old for one test: a skip
    found.stdout.fnmatch_lines(["*nccl: NCCL 22809, 23000 needed*"])
    cupy.has_nccl = False
    plain, strict = suite(text, gpus=None), suite(text, "--require-gpu", gpus=None)
    assert plain.ret == pytest.ExitCode.OK
    plain.stdout.fnmatch_lines(["*nccl: CuPy finds no libnccl"])
    assert strict.ret == pytest.ExitCode.TESTS_FAILED
    strict.stdout.fnmatch_lines(["*--require-gpu: nccl: CuPy finds no libnccl"])
