"""Plants faults of the table, one by one in copies of the repository, and runs their tests.

``PYTHONPATH=tests python -m planted_faults`` plants a sample, the same one every time; ``all``
plants every fault; other words plant those whose name, file or test contains one of them. First the
same tests must pass without a fault. Tests run in forked processes, in which NumPy and pytest
are imported already.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads do not survive a fork
os.environ.pop("CI", None)  # pytest would print whole differences, which takes 10 s for bytes

import hypothesis  # noqa: F401  # imported once, before the forks
import ml_dtypes  # noqa: F401
import numpy as np  # noqa: F401
import pytest

from .table import ROOT, Fault, read_table

NUM_SAMPLED = 100
SEED = 0
NUM_PROCESSES = 2
LIMIT_S = 300  # of one process
COPIED = ("src", "kernels", "tests", "bench", "examples", "docs", "tools", "pyproject.toml",
          "Dockerfile", "README.md", "CONTRIBUTING.md")  # fmt: skip
OPTIONS = (
    "-x", "-q", "--tb=short", "--no-header", "-p", "no:cacheprovider",
    "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
)  # fmt: skip


def is_on_the_fake(test: str) -> bool:
    """Whether a test runs on the fake CuPy."""
    return test.startswith("tests/backends/cuda/") or test.endswith("[cuda]")


@dataclass
class Job:
    """Tests, and the fault with which they must fail; without a fault they must pass."""

    tests: Sequence[str]
    fault: Fault | None = None
    began: float = field(default_factory=time.monotonic)

    def complaint(self, code: int, said: str) -> str:
        """Empty if the tests ended as expected; otherwise the reason."""
        wanted = pytest.ExitCode.TESTS_FAILED if self.fault else pytest.ExitCode.OK
        if code == -signal.SIGALRM:
            return f"took more than {LIMIT_S} s"
        if code != wanted:
            return f"pytest's exit status is {code}, expected {wanted:d}"
        if self.fault and self.fault.says not in said:
            return f"failed, but did not print {self.fault.says!r}"
        return ""


class Tree:
    """A copy of the files that the tests need, with at most one file changed."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root / "copy", root / "log"
        self._sound: tuple[Path, str] | None = None
        self._num_writes = 0
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            self.root.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, self.root / name)

    def plant(self, fault: Fault | None) -> None:
        """Removes the last fault and plants this one."""
        if self._sound is not None:
            self._write(*self._sound)
        self._sound = None
        if fault is not None:
            path = self.root / fault.file
            self._sound = path, path.read_text(encoding="utf-8")
            self._write(path, fault.planted(self.root))

    def _write(self, path: Path, text: str) -> None:
        """Writes a file with a new modification time, so that no old bytecode is used for it."""
        self._num_writes += 1
        path.write_text(text, encoding="utf-8")
        os.utime(path, (2**30 + self._num_writes,) * 2)

    def start(self, tests: Sequence[str]) -> int:
        """Starts the process that runs the tests, in its own process group."""
        process = os.fork()
        if process == 0:
            os.setsid()
            signal.alarm(LIMIT_S)
            self._child(tests)
        return process

    def _child(self, tests: Sequence[str]) -> NoReturn:
        code = 70
        try:
            with self.log.open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os.chdir(self.root)
            folders = [str(self.root / name) for name in ("src", "tests")]
            sys.path[:] = [*folders, *(each for each in sys.path if Path(each) != ROOT / "tests")]
            os.environ["PYTHONPATH"] = os.pathsep.join(folders)
            fake = ["-p", "fake_cupy.plugin"] if is_on_the_fake(tests[0]) else []
            code = int(pytest.main([*OPTIONS, *fake, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def ended(trees: Sequence[Tree], jobs: Sequence[Job]) -> Iterator[tuple[Job, int, str]]:
    """Yields each job with pytest's exit status and output; one runs in each tree at a time."""
    waiting, free = list(jobs), list(trees)
    running: dict[int, tuple[Tree, Job]] = {}
    try:
        while waiting or running:
            while waiting and free:
                tree, job = free.pop(), waiting.pop(0)
                tree.plant(job.fault)
                job.began = time.monotonic()
                running[tree.start(job.tests)] = tree, job
            process, status = os.wait()
            _kill(process)  # and all processes of the tests
            tree, job = running.pop(process)
            free.append(tree)
            said = tree.log.read_text(encoding="utf-8", errors="replace")
            yield job, os.waitstatus_to_exitcode(status), said
    finally:
        for process in running:
            _kill(process)


def _kill(process: int) -> None:
    """Kills a process with its group."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def chosen(words: Sequence[str]) -> list[Fault]:
    """The faults that the command line asks for.

    Raises:
        SystemExit: no fault contains the words.
        ValueError: an old text is not there exactly once.
    """
    faults = read_table()
    if not words:
        faults = random.Random(SEED).sample(faults, min(NUM_SAMPLED, len(faults)))
    elif words != ["all"]:
        faults = [
            fault for fault in faults
            if any(word in f"{fault.name} {fault.file} {fault.test}" for word in words)
        ]  # fmt: skip
    for fault in faults:
        fault.planted(ROOT)  # raises now, not after minutes
    lacking = [fault for fault in faults if fault.needs and not find_spec(fault.needs)]
    for fault in lacking:
        sys.stdout.write(f"left out, {fault.needs} is not installed: {fault.name}\n")
    faults = [fault for fault in faults if fault not in lacking]
    if not faults:
        sys.exit(f"no planted fault has one of {words} in its name, file or test")
    return faults


def main(words: Sequence[str]) -> int:
    """The number of faults that were not found, or of tests that fail without a fault."""
    faults, say = chosen(words), sys.stdout.write
    say(f"{len(faults)} of {len(read_table())} planted faults\n")
    tests = {fault.test: None for fault in faults}
    fake = [test for test in tests if is_on_the_fake(test)]
    sound = [Job(part) for part in (fake, [test for test in tests if test not in fake]) if part]
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("HOME", "XDG_CACHE_HOME", "HYPOTHESIS_STORAGE_DIRECTORY", "TMPDIR"):
            os.environ[name] = folder
        tempfile.tempdir = folder
        trees = [Tree(Path(folder) / str(number)) for number in range(NUM_PROCESSES)]
        for jobs in (sound, [Job([fault.test], fault) for fault in faults]):
            for job, code, said in ended(trees, jobs):
                name = job.fault.name if job.fault else f"no fault, {len(job.tests)} tests"
                complaint = job.complaint(code, said)
                seconds = time.monotonic() - job.began
                say(f"{'WRONG' if complaint else 'ok':5} {seconds:5.1f} s  {name}\n")
                if complaint:
                    num_wrong += 1
                    say(f"{complaint}: {' '.join(job.tests)}\n{said[-3000:]}\n")
                sys.stdout.flush()
            if num_wrong:
                break
    say("every test fails as it must\n" if not num_wrong else f"{num_wrong} wrong\n")
    return num_wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
