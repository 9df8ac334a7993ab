"""Processes with GPUs, which exchange by NCCL: one GPU that two share, or one for each.

NCCL lets processes share a GPU from 2.30 on, as an experiment: with few CTAs, without NVLS.
"""

import re

import pytest
from support.processes import check_scenario, run_scenario

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
BY_LAUNCHER = {"torchrun": pytest.mark.torch, "mpi": pytest.mark.mpi}
NEEDS = {
    "own": (pytest.mark.multi_gpu(2), pytest.mark.nccl),
    "shared": (pytest.mark.gpu, pytest.mark.nccl(23000)),
    "host": (pytest.mark.gpu,),
}


def cases(*devices):
    return [
        pytest.param(launcher, each, marks=(mark, *NEEDS[each]), id=f"{launcher}-{each}")
        for launcher, mark in BY_LAUNCHER.items()
        for each in devices
    ]


def allow(monkeypatch, devices):
    for name, value in SHARED.items() if devices == "shared" else ():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("launcher", "devices"), cases("own", "shared", "host"))
def test_gpus_sum_with_the_bits_of_one_process(launcher, devices, monkeypatch):
    allow(monkeypatch, devices)
    check_scenario(launcher, 2, "on_gpus", devices)


@pytest.mark.faults
@pytest.mark.parametrize(("launcher", "devices"), cases("own", "shared"))
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stopped", r"tensors 0 to 1.*process 1 of 2 has not come to call 3 .* within 3 s"),
        ("known_plan", r"tensors 0 to 1.*: the processes reduce different tensors: tensor 0 is"),
        ("fewer_steps", r"tensors 0 to 1.*: process 1: closed its mesh after 3 calls"),
    ],
)
def test_a_planted_fault(name, said, launcher, devices, monkeypatch):
    allow(monkeypatch, devices)
    done = run_scenario(launcher, 2, "planted", name, devices)
    assert done.returncode != 0, done.text
    assert "a sum of some replicas only" not in done.text
    survivors = re.findall(r"^survived ([\d.]+) of ([\d.]+) s: (.*)$", done.text, re.MULTILINE)
    assert survivors, done.text
    for seconds, deadline, error in survivors:
        assert re.search(said, error), done.text
        assert float(seconds) <= float(deadline) + 2
