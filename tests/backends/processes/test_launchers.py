"""Meshes over processes that torchrun and mpiexec have started."""

import pytest
from support.processes import MPI, TORCHRUN, run_scenario

from gradreduce.backends.processes.launchers import detect, slurm_address
from gradreduce.errors import BackendUnavailableError


def ends_well(launcher, size, scenario):
    """Runs a scenario of ``program.py``, which must end well in every process."""
    done = run_scenario(launcher, size, scenario)
    assert done.returncode == 0, done.text
    assert done.text.count("done") == size


@pytest.mark.parametrize("launcher", [TORCHRUN, MPI])
def test_processes_sum_with_the_bits_of_one(launcher):
    ends_well(launcher, {"torchrun": 2, "mpi": 4}[launcher], "values")


@pytest.mark.parametrize("launcher", [TORCHRUN, MPI])
def test_meshes_over_subgroups_work_in_turns(launcher):
    ends_well(launcher, 4, "subgroups")


def test_the_launcher_is_detected():
    assert detect({}) is None
    assert detect({"WORLD_SIZE": "1"}) is None
    assert detect({"SLURM_NTASKS": "4"}) is None  # set in batch scripts for one process too
    assert detect({"SLURM_STEP_NUM_TASKS": "4"}) == "slurm"
    assert detect({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}) == "mpi"
    assert detect({"WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}) == "torchrun"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu07", "gpu07"), ("node[003-008,12],other", "node003"), ("a1,b2", "a1"), ("n[5]", "n5")],
)
def test_the_address_of_a_slurm_step(nodes, host):
    environment = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_ID": "123456",
    }
    assert slurm_address(environment) == (3, 8, host, 61440 + 123456 % 4096)
    del environment["SLURM_PROCID"]
    with pytest.raises(BackendUnavailableError, match="SLURM_PROCID is not set: start this script"):
        slurm_address(environment)
