"""Starts ``program.py`` by torchrun or mpiexec, and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "backends" / "processes" / "program.py"
TORCHRUN = pytest.param("torchrun", marks=pytest.mark.torch)
MPI = pytest.param("mpi", marks=pytest.mark.mpi)


def start(launcher: str, size: int, scenario: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a scenario in so many processes, in a process group of their own."""
    if launcher == "mpi":
        command = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(size), sys.executable]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(size)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.Popen(
        [*command, str(PROGRAM), scenario, launcher, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_group(program: subprocess.Popen[str]) -> bool:
    """Ends what is left of a process group; returns whether there was anything."""
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
