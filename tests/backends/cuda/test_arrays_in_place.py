"""With ``num_packs=0`` users' CuPy arrays are read in place if peers can access them."""

from __future__ import annotations

import pytest
from support.arrays_in_place import check_reduced_in_place

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS


def array_on(device, host):
    import cupy

    with device.gpu:
        return cupy.asarray(host)


def overwrite(array) -> None:
    with array.device:
        array[...] = 0


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", [[0, 1], [0, 0, 1, 1]], ids=str)
def test_memory_of_cuda_malloc_is_not_packed(placement, algorithm, gpus):
    gpus(len(placement))
    with gr.open_mesh(placement, backend="cuda") as mesh:
        check_reduced_in_place(mesh, algorithm, "float32", array_on, overwrite, 0)


@pytest.mark.fake_cupy
@pytest.mark.parametrize(
    ("algorithm", "peers", "num_moved"),
    [("hierarchical_copy", True, 2), ("hierarchical_copy", False, 0), ("nccl", True, 0)],
)
def test_other_memory_is_packed_where_a_peer_would_read_it(algorithm, peers, num_moved, gpus):
    from fake_cupy.arrays import unmap

    def unmapped_on(device, host):
        array = array_on(device, host)
        if array.size:
            unmap(array)
        return array

    gpus(3, peers=peers)
    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        check_reduced_in_place(mesh, algorithm, "float32", unmapped_on, overwrite, num_moved)
