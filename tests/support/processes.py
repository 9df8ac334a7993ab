"""Runs programs in several processes, by torchrun or mpiexec."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

PROGRAM = Path(__file__).parents[1] / "comm" / "processes" / "program.py"
FAULT_PROGRAM = PROGRAM.with_name("fault_program.py")
# Starts processes with the variables that srun sets. The number of the job determines the port.
SRUN = """
import os, subprocess, sys
size, script = sys.argv[1], sys.argv[2:]
step = {"SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_NODELIST": "localhost,other"}
step |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
tasks = [
    subprocess.Popen(
        [sys.executable, *script],
        env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
    )
    for rank in range(int(size))
]
sys.exit(max(abs(task.wait()) for task in tasks))
"""
TORCHRUN = pytest.param("torchrun", marks=pytest.mark.torch)
SLURM = pytest.param("slurm", marks=pytest.mark.torch)
MPI = pytest.param("mpi", marks=pytest.mark.mpi)
RUN_ID = "TEST_RUN_ID"  # an environment variable of all processes of a run
RUN_S = 120.0  # longer than torchrun's 30 s for processes that do not end
LEAVE_S = 35.0  # for processes that outlive their launcher


class Run(NamedTuple):
    """A run that has ended: the launcher's exit status, and what all processes printed."""

    returncode: int
    text: str


def run_scenario(launcher: str, size: int, scenario: str, *arguments: str, **options: int) -> Run:
    return run(launcher, size, str(PROGRAM), scenario, launcher, *arguments, **options)


def check_scenario(
    launcher: str, size: int, scenario: str, *arguments: str, **options: int
) -> None:
    """Runs a scenario of ``program.py``, which must succeed in every process."""
    done = run_scenario(launcher, size, scenario, *arguments, **options)
    assert done.returncode == 0, done.text
    assert done.text.count("done") == size


def run_fault(
    launcher: str, size: int, fault: str, call: str = "reduce", deadline: float = 3.0
) -> Run:
    return run(launcher, size, str(FAULT_PROGRAM), launcher, fault, call, str(deadline))


def run(launcher: str, size: int, *script: str, restarts: int = 0, seconds: float = RUN_S) -> Run:
    """Runs a script in several processes; fails if it hangs, or if a process does not end."""
    python, number = sys.executable, str(size)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number]
    torchrun += ["--max-restarts", str(restarts)]
    command = {
        "none": [python],
        "mpi": [str(Path(python).with_name("mpiexec")), "-n", number, python],
        "torchrun": [python, *torchrun],
        "slurm": [python, "-c", SRUN, number],
    }[launcher]
    run_id = uuid.uuid4().hex
    return result_of(start([*command, *script], run_id), run_id, seconds)


def start(command: Sequence[str], run_id: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a launcher; pass the result to ``result_of``."""
    environment = {
        **os.environ,
        RUN_ID: run_id,
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",  # mpiexec has a terminal, in which rich would redraw its bar
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **variables,
    }
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def result_of(program: subprocess.Popen[str], run_id: str, seconds: float = RUN_S) -> Run:
    """Waits for the end of a run, and for all of its processes."""
    try:
        text, _ = program.communicate(timeout=seconds)
        end = time.monotonic() + LEAVE_S
        while (left := list(processes_of(run_id))) and time.monotonic() < end:
            time.sleep(0.02)
    except subprocess.TimeoutExpired:
        left = list(processes_of(run_id))
        end_all(run_id)
        text, _ = program.communicate()
    finally:
        end_all(run_id)
    assert not left, f"processes {left} were left behind, after {text}"
    return Run(program.returncode, text)


def processes_of(run_id: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if f"{RUN_ID}={run_id}".encode() in path.read_bytes():
                yield int(path.parent.name)


def end_all(run_id: str) -> None:
    for process in processes_of(run_id):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
