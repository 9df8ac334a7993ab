"""Which tests may skip: a pytest plugin that fails a run for any other skip.

``conftest.py`` loads it. It imports CuPy only for a test that needs a GPU, and for
``--require-gpu``, so that a run on a CPU is fast.
"""

import importlib.metadata
import importlib.util
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The files that the compile tier needs: for each wheel, their path in it below `nvidia`.
COMPILER_WHEELS = {
    "nvidia-cuda-nvrtc-cu12": "cuda_nvrtc/lib/libnvrtc.so.12",
    "nvidia-cuda-nvrtc": "cu13/lib/libnvrtc.so.13",
    "nvidia-cuda-nvdisasm": "cu13/bin/nvdisasm",
}
LIBRARIES = (
    "cupy",
    "torch",
    "jax",
    "ray",
    "safetensors",
    "expecttest",
    "lightning",
    "accelerate",
    "uv",
)  # markers with their names


def count_gpus() -> tuple[int, str]:
    """The number of CUDA devices that CuPy finds; if it is zero, with the reason."""
    with warnings.catch_warnings():
        # Warnings are errors in the tests, except those of CuPy about its own installation.
        warnings.simplefilter("default")
        try:
            import cupy

            count = int(cupy.cuda.runtime.getDeviceCount())
        except (ImportError, RuntimeError) as error:  # CUDARuntimeError is a RuntimeError
            lines = str(error).splitlines()
            return 0, f"{type(error).__name__}: {lines[0] if lines else 'no text'}"
    return count, "" if count else "CuPy sees no device"


def find_compiler(wheel: str) -> Path | None:
    """The file of one of ``COMPILER_WHEELS``; None if it is not installed."""
    namespace = importlib.util.find_spec("nvidia")
    if namespace is None:
        return None
    for folder in namespace.submodule_search_locations or ():
        found = Path(folder) / COMPILER_WHEELS[wheel]
        if found.is_file():
            return found
    return None


class TooOld(str):
    """The reason of a need that an older version leaves unmet: a skip also where it is required."""

    __slots__ = ()


def _nccl() -> Any:
    """CuPy's module, which it imports with a warning, not an error, where libnccl is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    return nccl


class SkipLedger:
    """Skips tests whose requirement is missing, counts them, and fails the run for other skips.

    Attributes:
        require_gpu: whether a missing GPU or NCCL is a failure instead of a skip.
        required: markers whose unmet need is a failure instead of a skip.
        allowed: for each skipped test, by node id, the marker whose need is not met.
        forbidden: node id and reason of every other skip.
    """

    def __init__(self, *, require_gpu: bool, required: tuple[str, ...] = ()) -> None:
        self.require_gpu = require_gpu
        self.required = (*required, *(("gpu", "nccl") if require_gpu else ()))
        self.allowed: dict[str, str] = {}
        self.forbidden: list[tuple[str, str]] = []
        self._gpus: tuple[int, str] | None = None
        # Needs are checked in this order: first the need that says most about the machine.
        self._needs: dict[str, Callable[[pytest.Mark], str | None]] = {
            "gpu": self._lacks_gpu,
            "multi_gpu": self._lacks_gpus,
            "nccl": self._lacks_nccl,
            "libnccl": self._lacks_libnccl,
            "host": self._lacks_compiler,
            "nvrtc": self._lacks_nvrtc,
            **dict.fromkeys(LIBRARIES, self._lacks_library),
            "mpi": self._lacks_mpi,
        }

    @property
    def gpus(self) -> tuple[int, str]:
        """The result of ``count_gpus``, computed once and only when needed."""
        if self._gpus is None:
            self._gpus = count_gpus()
        return self._gpus

    def _lacks_gpu(self, mark: pytest.Mark) -> str | None:
        count, why = self.gpus
        return None if count else f"no CUDA device ({why})"

    def _lacks_gpus(self, mark: pytest.Mark) -> str | None:
        if len(mark.args) != 1 or not isinstance(mark.args[0], int) or mark.args[0] < 2:
            pytest.fail(f"multi_gpu takes one int of at least 2, got {mark.args}", pytrace=False)
        count, why = self.gpus
        if count >= mark.args[0]:
            return None
        return f"{count} CUDA devices, {mark.args[0]} needed" + (f" ({why})" if why else "")

    def _lacks_nccl(self, mark: pytest.Mark) -> str | None:
        lacking = self._lacks_gpu(mark) or self._lacks_libnccl(mark)
        if lacking or not mark.args:
            return lacking
        version = _nccl().get_version()
        if version < mark.args[0]:
            return TooOld(f"NCCL {version}, {mark.args[0]} needed")
        return None

    def _lacks_libnccl(self, mark: pytest.Mark) -> str | None:
        try:
            return None if _nccl().available else "CuPy finds no libnccl"
        except ImportError:
            return "cupy is not installed"

    def _lacks_compiler(self, mark: pytest.Mark) -> str | None:
        return None if shutil.which("g++") else "no g++ on PATH"

    def _lacks_nvrtc(self, mark: pytest.Mark) -> str | None:
        for needed in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvdisasm", *mark.args):
            wheel, _, version = needed.partition("==")
            found = find_compiler(wheel)
            if found is None:
                return f"no {COMPILER_WHEELS[wheel]} of the wheel {wheel}"
            if version and importlib.metadata.version(wheel) != version:
                return f"the figures are of {needed}, not of {importlib.metadata.version(wheel)}"
        return None

    def _lacks_mpi(self, mark: pytest.Mark) -> str | None:
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed"
        launcher = Path(sys.executable).with_name("mpiexec")
        return None if launcher.exists() else f"no {launcher}"

    def _lacks_library(self, mark: pytest.Mark) -> str | None:
        return None if importlib.util.find_spec(mark.name) else f"{mark.name} is not installed"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skips or fails a test whose need is not met, before its fixtures are set up."""
        for name, lacks in self._needs.items():
            for mark in item.iter_markers(name):
                reason = lacks(mark)
                if reason is None:
                    continue
                if name in self.required and not isinstance(reason, TooOld):
                    option = "-gpu: " + name if name in ("gpu", "nccl") else f"={name}"
                    pytest.fail(f"--require{option}: {reason}", pytrace=False)
                self.allowed[item.nodeid] = name
                pytest.skip(f"{name}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records every skip that the setup above did not cause, except expected failures."""
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        if report.nodeid not in self.allowed:
            self._keep(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records the skip of a whole module, whose tests have no markers."""
        if report.skipped:
            self._keep(report)

    def _keep(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        # A skip's longrepr is (path, line, "Skipped: why").
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        self.forbidden.append((report.nodeid, str(reason)))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbidden and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.allowed:
            counts = Counter(self.allowed.values())
            text = ", ".join(f"{name} {counts[name]}" for name in self._needs if counts[name])
            terminalreporter.write_line(f"allowed skips: {text}")
        if self.forbidden:
            terminalreporter.section("forbidden skips", red=True, bold=True)
            for nodeid, reason in self.forbidden:
                terminalreporter.write_line(f"{nodeid}: {reason}")
            names = ", ".join(self._needs)
            terminalreporter.write_line(
                f"The run FAILS: {len(self.forbidden)} skipped, and only a test marked with an "
                f"unmet need may skip ({names}).",
                red=True,
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, instead of skipping, where a test's GPU or NCCL is missing",
    )
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="MARKER",
        help="fail, instead of skipping, where the need of this marker is not met (torch, jax, …)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Installs the ledger; with ``--require-gpu`` and no GPU the run ends here."""
    ledger = SkipLedger(
        require_gpu=config.getoption("--require-gpu"), required=tuple(config.getoption("--require"))
    )
    if ledger.require_gpu and not ledger.gpus[0]:
        raise pytest.UsageError(f"--require-gpu: no CUDA device ({ledger.gpus[1]})")
    config.pluginmanager.register(ledger, "skip-ledger")
