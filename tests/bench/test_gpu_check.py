"""``bench/gpu_check.sh`` does what bench/README.md says of it, tried on the fake CuPy.

That every section shows what it should is seen on a GPU alone; here: each leaves its file whatever
happens, nothing survives it, and what failed is not called passed.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu_check.sh"
SECTIONS = ("tests", "nccl", "example", "bench", "sanitize")
STEPS = (
    "first:1-versions", "first:2-kernels", "first:3-arrays", "first:4-faults", "first:5-host-time",
    "first:6-counters", "first:7-benchmarks", "first:8-libraries", "first:9-new",
)  # fmt: skip
KEYS = {
    "section", "gpu", "num_gpus", "details", "versions", "commit", "sources", "date", "command",
    "limit_seconds", "status", "reason", "seconds", "results",
}  # fmt: skip
RESULT_KEYS = {"name", "outcome", "seconds", "figures", "reason", "tail"}
LIMIT_S = 120.0  # for work of seconds: only a hang takes as long

PASSES = """
import json, sys
json.dump({"quick": "--quick" in sys.argv}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
"""
FAILS = "print('below the floor'); raise SystemExit(1)"
# It has a child that does not mind SIGTERM, and tells who the two are when both are there.
HANGS = """
import os, pathlib, signal, subprocess, sys
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
child = subprocess.Popen([sys.executable, "-c", code + "signal.pause()"], stdout=subprocess.PIPE)
child.stdout.readline()
part = pathlib.Path(__file__).with_suffix(".part")
part.write_text(f"{os.getpid()} {child.pid}")
part.rename(part.with_suffix(".pids"))
signal.pause()
"""


class Run(NamedTuple):
    """A finished run: its exit status, its output, and the file of each section."""

    status: int
    text: str
    records: dict[str, dict]


class Folders(NamedTuple):
    """The folders of a run: for its benchmarks, and for its files."""

    benches: Path
    out: Path

    def started(self, *arguments: str, **changed: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(self.out), **changed}
        return subprocess.Popen(
            ["bash", str(SCRIPT), "--benches", str(self.benches), *arguments],
            env=environment, cwd=self.out, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ended(self, process: subprocess.Popen[str]) -> Run:
        text, _ = process.communicate(timeout=LIMIT_S)
        records = [json.loads(path.read_text("utf-8")) for path in self.out.glob("*.json")]
        return Run(process.returncode, text, {record["section"]: record for record in records})

    def run(self, *arguments: str, **changed: str) -> Run:
        return self.ended(self.started(*arguments, **changed))


def folders_in(folder: Path, benches: dict[str, str]) -> Folders:
    made = Folders(folder / "benches", folder / "out")
    for path in made:
        path.mkdir()
    for name, text in benches.items():
        (made.benches / name).write_text(text, encoding="utf-8")
    return made


@pytest.fixture
def hanging(tmp_path) -> Iterator[Folders]:
    """A benchmark that never ends; it is killed with the test, also if the test fails."""
    folders = folders_in(tmp_path, {"bench_hangs.py": HANGS})
    yield folders
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.killpg(pids_of(folders)[0], signal.SIGKILL)  # the leader of its group


def pids_of(folders: Folders) -> list[int]:
    words = (folders.benches / "bench_hangs.pids").read_text(encoding="utf-8").split()
    return [int(word) for word in words]


def wait_until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, f"not in time: {what}"


def hangs(folders: Folders) -> bool:
    return (folders.benches / "bench_hangs.pids").exists()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def check_ended(folders: Folders) -> None:
    for pid in pids_of(folders):
        wait_until(lambda pid=pid: not is_alive(pid), f"the end of process {pid}")


# All sections, on the fake ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_run(tmp_path_factory) -> Run:
    folders = folders_in(tmp_path_factory.mktemp("whole"), {"bench_passes.py": PASSES})
    found = folders.run("--fake", *SECTIONS)
    assert sorted(path.suffix for path in folders.out.iterdir()) == [".json"] * len(SECTIONS)
    assert all(path.name.startswith("fake-2") for path in folders.out.iterdir())
    return found


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_section_leaves_one_file_with_figures(full_run):
    assert full_run.status == 0, full_run.text
    assert sorted(full_run.records) == sorted(SECTIONS)
    for name, record in full_run.records.items():
        assert set(record) == KEYS
        assert record["status"] == ("skipped" if name == "sanitize" else "passed"), record
        assert record["command"][0] == "bench/gpu_check.sh"
        assert record["limit_seconds"] == 480
        assert record["results"]
        for result in record["results"]:
            assert set(result) == RESULT_KEYS
            assert result["outcome"] in ("passed", "skipped")
            assert math.isfinite(result["seconds"])
    figures = {
        section: {result["name"]: result["figures"] for result in record["results"]}
        for section, record in full_run.records.items()
    }
    (counts,) = (found for name, found in figures["tests"].items() if name != "collection")
    assert counts["passed"] > 0
    assert not {"failed", "error", "errors", "skipped"} & counts.keys()
    assert figures["nccl"]["NCCL's version"]["version"] >= 23000
    assert figures["nccl"]["one process, 2 ranks on one GPU"]["compared"] > 100
    assert figures["nccl"]["a process for each of 1 rank"]["compared"] > 100
    assert 0 < figures["example"]["hierarchical_copy on cuda"]["accuracy"] <= 1
    assert figures["bench"]["copy rate"]["median_gigabytes_per_second"] > 0
    assert figures["bench"]["bench_passes.py"] == {"quick": True}


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("step", STEPS)
def test_every_step_of_first_runs(tmp_path, step):
    """Tests are collected only: the suite runs them on the fake anyway."""
    found = folders_in(tmp_path, {"bench_ops.py": PASSES, "bench_all_reduce.py": PASSES}).run(
        "--fake", step
    )
    assert found.status == 0, found.text
    (record,) = found.records.values()
    assert (record["section"], record["status"]) == (step, "passed")
    for result in record["results"]:
        assert result["outcome"] == "passed" or result["reason"], result
        if result["name"].endswith("collected"):
            assert sum(result["figures"].values()) > 0, result


# What goes wrong ----------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_failing_check_fails_the_run_and_stops_no_other(tmp_path):
    folders = folders_in(tmp_path, {"bench_a.py": FAILS, "bench_b.py": PASSES, "bench_c.py": ""})
    found = folders.run("--fake", "bench", "sanitize")
    assert found.status == 1, found.text
    record = found.records["bench"]
    assert (record["status"], found.records["sanitize"]["status"]) == ("failed", "skipped")
    assert record["reason"] == "bench_a.py: exit status 1"
    _, failed, passed, silent = record["results"]
    assert (failed["outcome"], passed["outcome"], silent["outcome"]) == (
        "failed", "passed", "failed",
    )  # fmt: skip
    assert "below the floor" in failed["tail"]
    assert "its figures cannot be read" in silent["reason"]


@pytest.mark.parametrize(
    ("number", "status", "reasons"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, ["SIGTERM", "SIGTERM before it began"]),
        pytest.param(
            signal.SIGKILL, -signal.SIGKILL,
            ["the run ended during 'bench_hangs.py'", "it has not begun"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_a_run_that_a_signal_ends_has_said_what_it_was_doing(hanging, number, status, reasons):
    process = hanging.started("--fake", "bench", "sanitize")
    wait_until(lambda: hangs(hanging), "the start of the benchmark")
    process.send_signal(number)
    found = hanging.ended(process)
    assert found.status == status, found.text
    if number != signal.SIGKILL:  # it has ended all that it started
        check_ended(hanging)
    records = [found.records[name] for name in ("bench", "sanitize")]
    assert [record["status"] for record in records] == ["stopped"] * 2
    assert [record["reason"] for record in records] == reasons
    assert [one["outcome"] for one in records[0]["results"]] == ["passed", "stopped"]


def test_without_a_gpu_it_says_so(tmp_path):
    broken = tmp_path / "broken" / "cupy"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('none of that here')\n")
    folders = folders_in(tmp_path, {})
    found = folders.run(PYTHONPATH=str(broken.parent))
    assert found.status == 3
    assert "No section has run: no CUDA device (ImportError: none of that here)" in found.text
    assert sorted(found.records) == sorted((*STEPS, *SECTIONS))
    for record in found.records.values():
        assert set(record) == KEYS
        assert (record["status"], record["gpu"], record["results"]) == ("skipped", "none", [])
        assert "none of that here" in record["reason"]
