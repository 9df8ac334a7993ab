"""``gradreduce check`` and ``bench`` in several processes, which torchrun and mpiexec start."""

import json
from pathlib import Path

import pytest
from support.processes import MPI, TORCHRUN, Run, run

PROGRAM = Path(__file__).with_name("process_program.py")


def run_command(launcher: str, wrong: str, *arguments: str) -> Run:
    """Runs the command on two simulated devices of each of two processes."""
    options = ("--backend", "sim", "--devices", "2")
    return run(launcher, 2, str(PROGRAM), wrong, *arguments, *options)


def statuses(done: Run) -> list[bool]:
    """Whether each process has printed that it exits with the launcher's exit status."""
    return [f"process {rank} exits with {done.returncode}\n" in done.text for rank in range(2)]


@pytest.mark.parametrize("launcher", [TORCHRUN, MPI])
def test_one_process_prints_and_all_have_the_exit_status(launcher):
    done = run_command(launcher, "nothing", "check")
    assert (done.returncode, statuses(done)) == (0, [True, True]), done.text
    verdict = "Everything works on simulated devices [0, 1] and in 1 other process."
    assert done.text.count(verdict) == 1
    assert done.text.count(" works  ") == 7


@pytest.mark.torch
def test_a_failure_in_another_process_is_printed_and_is_the_exit_status_of_all():
    done = run_command("torchrun", "sum", "check")
    assert (done.returncode, statuses(done)) == (1, [True, True]), done.text
    assert "FAILED   process 1: AssertionError: got [" in done.text
    assert done.text.count(" works  ") == 6
    assert "in 1 other process this does not work: sum of terms (add_n)." in done.text


@pytest.mark.torch
def test_the_all_reduce_of_bench_runs_over_all_processes(tmp_path):
    """Wrong sums of process 1 count; the four replicas of both processes are reduced."""
    path = tmp_path / "bench.json"
    sizes = ("--min-bytes", "64", "--max-bytes", "64", "--iterations", "1", "--rounds", "1")
    arguments = ("bench", "all-reduce", "add_n", *sizes, "--json", str(path))
    done = run_command("torchrun", "sum", *arguments)
    assert (done.returncode, statuses(done)) == (0, [True, True]), done.text
    found = json.loads(path.read_text())
    assert (found["devices"], found["processes"]) == ("sim [0, 1]", 2)
    reduced, added = found["rows"]
    assert reduced["busbw"] == pytest.approx(reduced["algbw"] * 3 / 2)  # 2 (n - 1) / n
    assert (reduced["wrong"], added["wrong"]) == (0, 16)
    title = "all-reduce: nccl on sim [0, 1] of each of 2 processes"
    assert done.text.count(title) == 1
