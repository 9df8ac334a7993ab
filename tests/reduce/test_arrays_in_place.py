"""With ``num_packs=0`` users' own arrays are read in place."""

import itertools

import numpy as np
import pytest
from support.arrays_in_place import check_reduced_in_place
from support.exact_data import exact_data, same
from support.meshes import MeshCase, unchanged

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

SUM = gr.ReduceOp.SUM
PLACEMENTS = [(0, 0, 0), (0, 1, 2), (0, 0, 1, 1)]
KERNELS = ["numpy", pytest.param("compiled", marks=pytest.mark.host)]


def copied(_device, host) -> np.ndarray:
    return np.array(host)


def zero(array) -> None:
    array[...] = 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "complex64"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("peer_access", [True, False])
def test_nothing_is_packed(placement, algorithm, dtype, kernels, peer_access):
    with MeshCase(placement, peer_access, kernels).open() as mesh:
        check_reduced_in_place(mesh, algorithm, dtype, copied, zero, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_deferred_work_reads_copies(algorithm, seed):
    with gr.open_mesh((0, 1, 1), backend="sim", schedule_seed=seed, strict=True) as mesh:
        check_reduced_in_place(mesh, algorithm, "float32", copied, zero, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_packs", [0, 1, 2])
def test_arrays_that_alias_are_strided_or_read_only(algorithm, num_packs):
    block = exact_data((40,), "float32")
    fixed = exact_data((8,), "float32", seed=1)
    fixed.flags.writeable = False
    with MeshCase((0, 1, 2)).open() as mesh, unchanged(block):
        ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)
        rows = {
            "alias": [block[:8]] * 3,
            "overlap": [block[start : start + 8] for start in range(3)],
            "strided": [block[start::5] for start in range(3)],
            "read-only": [fixed, block[:8], fixed],
        }
        found = ops.all_reduce([list(column) for column in zip(*rows.values(), strict=True)], SUM)
        for replica in found:
            for result, terms in zip(replica, rows.values(), strict=True):
                assert same(result, sum(terms[1:], terms[0]))
                assert not any(np.may_share_memory(result, term) for term in terms)


@pytest.mark.parametrize(
    "case",
    tuple(itertools.product(ALGORITHMS, [(0, 0, 0), (0, 1, 2), (0, 0, 1)], [0, 1, 2])),
    ids=str,
)
def test_out_may_be_the_replica_of_another_device(case):
    """Simulated devices share the host's memory; nothing is written before it is read."""
    algorithm, placement, num_packs = case
    hosts = [exact_data((9,), "float32", seed=index) for index in range(3)]
    with MeshCase(placement).open() as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)
        for order in itertools.permutations(range(3)):
            arrays = [host.copy() for host in hosts]
            twice = [arrays[0], arrays[0], arrays[1]]
            fresh = [arrays[0], np.empty(9, np.float32), arrays[1]]
            for given, out in ((arrays, [arrays[at] for at in order]), (twice, fresh)):
                wanted = sum(given[1:], given[0])
                ops.all_reduce([[each] for each in given], SUM, out=[[each] for each in out])
                assert all(same(each, wanted) for each in out)


def array_on(device, host):
    import cupy

    with device.gpu:
        return cupy.asarray(host)


def zero_on_gpu(array) -> None:
    with array.device:
        array[...] = 0


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", [[0, 1], [0, 0, 1, 1]], ids=str)
def test_memory_of_cuda_malloc_is_not_packed(placement, algorithm, gpus):
    gpus(len(placement))
    with gr.open_mesh(placement, backend="cuda") as mesh:
        check_reduced_in_place(mesh, algorithm, "float32", array_on, zero_on_gpu, 0)


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
        check_reduced_in_place(mesh, algorithm, "float32", unmapped_on, zero_on_gpu, num_moved)
