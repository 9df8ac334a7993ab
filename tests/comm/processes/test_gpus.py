"""Processes with GPUs, which exchange by NCCL: one GPU that two share, or one for each.

NCCL lets processes share a GPU from 2.30 on, as an experiment: with few CTAs, without NVLS.
"""

import pytest
from support.processes import check_scenario

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
