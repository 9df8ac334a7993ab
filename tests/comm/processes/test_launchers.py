"""Meshes over processes that torchrun and mpiexec have started."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import MPI, TORCHRUN, check_scenario, run
from support.signal_injection import alarm

from gradreduce.comm.launchers import detect, slurm_address
from gradreduce.errors import BackendUnavailableError, CollectiveError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "optimizers.md"


@pytest.mark.parametrize("launcher", [TORCHRUN, MPI])
def test_meshes_over_subgroups_work_in_turns(launcher):
    check_scenario(launcher, 4, "subgroups")


@pytest.mark.repo
@pytest.mark.torch
def test_the_first_example_of_the_optimizers_page_trains_in_several_processes(tmp_path):
    (block, *_) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (printed,) = re.findall(r"^print.*  # (.*)$", block, re.MULTILINE)
    script = tmp_path / "example.py"
    script.write_text(block)
    done = run("torchrun", 2, str(script))
    # torchrun passes -u to Python, so the lines of two processes may mix.
    parts = re.findall(r"\[.*?\]", printed)
    assert parts
    assert (done.returncode, *map(done.text.count, parts)) == (0, *[2 for _ in parts]), done.text


@pytest.mark.torch
def test_processes_that_torchrun_starts_again_meet_each_other_only():
    check_scenario("torchrun", 2, "restarted", restarts=1)


@pytest.mark.torch
def test_keys_of_earlier_processes_in_a_store_are_ignored():
    import torch.distributed as dist

    from gradreduce.comm.torch_group import _new_name

    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:

        def start(rank):
            return pool.submit(_new_name, store, rank, 2, 10.0)

        before = [each.result() for each in (start(0), start(1))]
        late = store.get("gradreduce/here")
        first = start(0)  # finds the number of the earlier process 1
        end = time.monotonic() + 10
        while store.get("gradreduce/here") == late and time.monotonic() < end:
            time.sleep(1e-3)
        names = [each.result() for each in (start(1), first)]
    assert names == [names[0]] * 2 and names[0] not in before
    with pytest.raises(CollectiveError, match=r"these have not come .* within 0.1 s: 1;"):
        _new_name(store, 0, 2, 0.1)
    with pytest.raises(CollectiveError, match=r"these have not come .* within 0.1 s: 0;"):
        _new_name(store, 1, 2, 0.1)


@pytest.mark.torch
def test_ddp_trains_alike_with_our_hook_and_so_does_data_parallel():
    check_scenario("torchrun", 3, "pytorch")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_hook_of_fsdp_averages_over_the_copies_of_shards():
    check_scenario("torchrun", 4, "hybrid")


@pytest.mark.jax
@pytest.mark.mpi
def test_arrays_of_jax_are_summed_over_processes():
    check_scenario("mpi", 2, "jax_arrays")


@pytest.mark.torch
def test_a_store_that_does_not_answer_has_a_deadline_and_can_be_interrupted():
    from gradreduce.comm.torch_group import _call

    ends = threading.Event()
    with pytest.raises(CollectiveError, match=r"the store does not answer within 0\.01 s"):
        _call(ends.wait, 0.01)
    try:
        with pytest.raises(KeyboardInterrupt), alarm(0.1):
            _call(ends.wait, 60.0)
    finally:
        ends.set()


def test_the_launcher_is_detected():
    assert detect({}) is None
    assert detect({"WORLD_SIZE": "1"}) is None
    assert detect({"SLURM_NTASKS": "4"}) is None  # set in batch scripts for one process too
    assert detect({"SLURM_STEP_NUM_TASKS": "4"}) == "slurm"
    assert detect({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}) == "mpi"
    assert detect({"WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}) == "torchrun"
    assert detect({"WORLD_SIZE": "\u0662"}) is None  # a digit, but not of ASCII
    assert detect({"WORLD_SIZE": "2" * 5000}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu07", "gpu07"),
        ("node[003-008,12],other", "node003"),
        ("a1,b2", "a1"),
        ("n[5]", "n5"),
        ("rack[2-3]node[07,09]-ib,rack[4]", "rack2node07-ib"),
    ],
)
def test_the_address_of_a_slurm_step(nodes, host):
    environment = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_ID": "123456",
    }
    steps = [slurm_address({**environment, "SLURM_STEP_ID": str(step)}) for step in range(9)]
    assert {found[:3] for found in steps} == {(3, 8, host)}
    assert len({found[3] for found in steps}) == 9
    assert all(61440 <= found[3] < 65536 for found in steps)
    with pytest.raises(BackendUnavailableError, match="SLURM_STEP_NUM_TASKS=3: in a heterogeneous"):
        slurm_address({**environment, "SLURM_STEP_NUM_TASKS": "3"})
    with pytest.raises(BackendUnavailableError, match="SLURM_STEP_NUM_TASKS='\u0668' must be num"):
        slurm_address({**environment, "SLURM_STEP_NUM_TASKS": "\u0668"})
    del environment["SLURM_PROCID"]
    with pytest.raises(BackendUnavailableError, match="SLURM_PROCID is not set: start this script"):
        slurm_address(environment)
