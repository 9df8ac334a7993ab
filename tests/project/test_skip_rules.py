"""The rules for skips, tested on small suites that run with the plugin alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import skip_rules as skips

pytest_plugins = ("pytester",)

TESTS = Path(__file__).resolve().parents[1]

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

    def run(text: str, *args: str, gpus: tuple[int, str] = NO_GPU) -> pytest.RunResult:
        monkeypatch.setattr(skips, "count_gpus", lambda: gpus)
        # Without third-party plugins, which could change the results; and runs start faster.
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        pytester.makeini(MARKERS)
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


def test_optional_tiers_skip_where_their_tool_is_absent(suite, monkeypatch):
    text = marked(["host", "nvrtc"])
    with monkeypatch.context() as patch:
        patch.setattr(skips, "find_compiler", lambda wheel: None)
        patch.setenv("PATH", "")
        absent = suite(text)
    assert absent.ret == pytest.ExitCode.OK
    absent.assert_outcomes(skipped=2)
    absent.stdout.fnmatch_lines(["allowed skips: host 1, nvrtc 1"])
    absent.stdout.fnmatch_lines_random(["*host: no g++ on PATH", "*nvrtc: no *libnvrtc.so.12 of *"])

    monkeypatch.setattr(skips, "find_compiler", Path)
    monkeypatch.setattr(skips.shutil, "which", lambda name: f"/usr/bin/{name}")
    suite(text).assert_outcomes(passed=2)


def test_nvrtc_is_found_in_the_wheels_folder_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert skips.find_compiler("nvidia-cuda-nvrtc") is None
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    sys.path_importer_cache.pop(str(tmp_path), None)  # the cache says that the folder is empty
    assert skips.find_compiler("nvidia-cuda-nvrtc") is None
    library.touch()
    assert skips.find_compiler("nvidia-cuda-nvrtc") == library


def marked(marks: Sequence[str]) -> str:
    """A suite with a test for each mark."""
    return "\n".join(
        f"@pytest.mark.{mark}\ndef test_{number}(): pass" for number, mark in enumerate(marks)
    )


def test_figures_of_another_version_are_not_compared(suite, monkeypatch):
    monkeypatch.setattr(skips, "find_compiler", Path)
    monkeypatch.setattr(skips.importlib.metadata, "version", lambda wheel: "12.9.86")
    wheels = ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-nvrtc-cu12==12.9.41"]
    result = suite(marked([f"nvrtc({wheel!r})" for wheel in wheels]))
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*nvrtc: the figures are of *==12.9.41, not of 12.9.86"])


def test_several_gpus_are_a_number_of_at_least_two(suite):
    result = suite(marked(["multi_gpu(2)", "multi_gpu(3)"]), "--require-gpu", gpus=(2, ""))
    assert result.ret == pytest.ExitCode.OK  # too few GPUs for a test is a skip too
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*multi_gpu: 2 CUDA devices, 3 needed"])
    wrong = ["multi_gpu", "multi_gpu(1)", "multi_gpu(2, 3)", "multi_gpu('2')"]
    result = suite(marked(wrong), gpus=(8, ""))
    result.assert_outcomes(errors=len(wrong))
    result.stdout.fnmatch_lines(["*multi_gpu takes one int of at least 2, got *"])


def test_require_gpu_without_a_gpu_ends_the_run(suite):
    result = suite("def test_a(): pass", "--require-gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --require-gpu: no CUDA device (ImportError: *cupy*)"])
    result.stdout.no_fnmatch_line("*passed*")


RUNTIME = """
from types import SimpleNamespace
def getDeviceCount():
    {}
runtime = SimpleNamespace(getDeviceCount=getDeviceCount)
"""
NCCL = """
import warnings
available = {}
warnings.warn('NCCL could not be loaded')
def get_version():
    return 22809
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Runs pytest in a folder, with a ``cupy`` that is found before a real one."""
    package = tmp_path / "fake" / "cupy"
    (package / "cuda").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text(MARKERS + "filterwarnings = error\n")

    def run(cwd: Path, text: str, body: str, *args: str, nccl: bool = False):
        (package / "__init__.py").write_text(text)
        (package / "cuda" / "__init__.py").write_text(RUNTIME.format(body))
        (package / "cuda" / "nccl.py").write_text(NCCL.format(nccl))
        path = f"{package.parent}{os.pathsep}{TESTS}"
        more = {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
        return subprocess.run(
            command, cwd=cwd, env={**os.environ, **more}, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip

    return run


def test_our_own_suite_refuses_to_pass_without_its_gpu(run_pytest):
    # Collected only: if the run did not end as it must, it would start itself again and again.
    result = run_pytest(
        TESTS.parent, "from cupy import cuda", "raise RuntimeError('cudaErrorInsufficientDriver')",
        "--require-gpu", "--collect-only", str(TESTS / "test_conftest.py"),
    )  # fmt: skip
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.strip() == (
        "ERROR: --require-gpu: no CUDA device (RuntimeError: cudaErrorInsufficientDriver)"
    )


RULES = ("-p", "support.skip_rules", "-ra", "test_it.py")


@pytest.mark.parametrize("nccl", [True, False])
def test_nccl_must_run_or_fail_with_require_gpu(run_pytest, tmp_path, nccl):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.gpu\n" + marked(["nccl", "nccl(23000)"])
    )
    args = (tmp_path, "from cupy import cuda", "return 1", *RULES)
    strict = run_pytest(*args, "--require-gpu", nccl=nccl)
    if nccl:
        assert strict.returncode == pytest.ExitCode.OK, strict.stdout
        assert "nccl: NCCL 22809, 23000 needed" in strict.stdout  # too old for one test: a skip
        return
    plain = run_pytest(*args)
    assert plain.returncode == pytest.ExitCode.OK
    assert "nccl: CuPy finds no libnccl" in plain.stdout
    assert strict.returncode == pytest.ExitCode.TESTS_FAILED
    assert "--require-gpu: nccl: CuPy finds no libnccl" in strict.stdout


def test_a_cpu_run_never_imports_cupy(run_pytest, tmp_path):
    (tmp_path / "test_it.py").write_text("def test_a(): pass\n")
    result = run_pytest(tmp_path, "raise AssertionError('imported')", "pass", *RULES)
    assert result.returncode == pytest.ExitCode.OK, result.stdout + result.stderr
