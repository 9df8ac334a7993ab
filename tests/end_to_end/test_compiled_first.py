"""Public calls compile their kernels before their first launch, and not again."""

import re
from functools import partial

import pytest
from support.compiled_first import check_program
from support.mesh_programs import PROGRAMS, every_dtype
from support.meshes import MeshCase
from support.thread_group import run_processes
from support.training_programs import trained

import gradreduce as gr

# Programs with the kernels and the calls of others.
LIKE_OTHERS = re.compile(
    "stages|prepared,|captured copies|queue|then freed|EXPERIMENTAL|float(32|64)$|"
    "optimizer, (sgd|nesterov|adag|adam.|lion|rms|lazy)"
)
NAMES = [name for name in PROGRAMS if not LIKE_OTHERS.search(name)]


@pytest.mark.parametrize("peer_access", [True, False])
@pytest.mark.parametrize("placement", [(0, 0), (0, 0, 1), (0, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_call_compiles_after_its_first_launch(name, placement, peer_access):
    with MeshCase(placement, peer_access).open() as mesh:
        check_program(mesh, PROGRAMS[name])


@pytest.mark.fake_cupy
@pytest.mark.parametrize("name", NAMES)
def test_no_call_compiles_after_its_first_launch_on_gpus(name, gpus):
    gpus(0)
    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        check_program(mesh, PROGRAMS[name])


@pytest.mark.parametrize(
    "program",
    [
        partial(every_dtype, "nccl"),
        partial(every_dtype, "hierarchical_copy", reduction_groups="processes"),
        partial(trained, "hierarchical_copy", 2),
    ],
)
def test_nor_does_a_call_of_several_processes(program):
    def work(group):
        num = 1 + group.rank
        with gr.open_mesh([0, 1][:num], backend="sim", process_group=group) as mesh:
            check_program(mesh, program)

    run_processes(2, work)
