"""Public calls compile their kernels before their first launch, and not again."""

from __future__ import annotations

import pytest
from support.compiled_first import CALLS, check_compiled_first
from support.meshes import MeshCase
from support.thread_group import run_processes

import gradreduce as gr


@pytest.mark.parametrize("peer_access", [True, False])
@pytest.mark.parametrize("placement", [(0,), (0, 0, 1), (0, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_no_call_compiles_after_its_first_launch(name, placement, peer_access):
    with MeshCase(placement, peer_access).open() as mesh:
        check_compiled_first(mesh, CALLS[name])


@pytest.mark.fake_cupy
@pytest.mark.parametrize("name", CALLS)
def test_no_call_compiles_after_its_first_launch_on_gpus(name, gpus):
    gpus(0)
    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        check_compiled_first(mesh, CALLS[name])


@pytest.mark.parametrize("name", ["nccl", "copies", "groups of processes", "destinations"])
def test_nor_does_a_call_of_several_processes(name):
    def work(group):
        num = 1 + group.rank
        with gr.open_mesh([0, 1][:num], backend="sim", process_group=group) as mesh:
            check_compiled_first(mesh, CALLS[name])

    run_processes(2, work)
