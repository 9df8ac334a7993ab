"""reduce_buffers, which runs after validation: what it overwrites, and where results are."""

from contextlib import ExitStack

import numpy as np
import pytest
from support.exact_data import random_data, same
from support.meshes import PLACEMENTS, MeshCase, expected_of, num_grown, placement_of

import gradreduce as gr
from gradreduce.device import overlap
from gradreduce.reduce.algorithms import ALGORITHMS


def check(results, expected):
    for buffers, wanted in zip(results, expected, strict=True):
        for buffer in buffers:
            assert same(buffer.numpy(), wanted)


def filled_flat(mesh, shapes, dtype="float32"):
    """A flat buffer of random data: ``views[tensor][replica]``, and copies of the arrays."""
    flat = mesh.flat_buffer(shapes, dtype)
    views = list(zip(*flat.views, strict=True))
    for tensor, replicas in enumerate(views):
        for replica, view in enumerate(replicas):
            array = random_data(view.shape, dtype, seed=100 * tensor + replica)
            view.device.upload(array, out=view)
    return flat, views, [[view.numpy() for view in replicas] for replicas in views]


def expected_sums(algorithm, arrays, mesh):
    return [expected_of(algorithm, of_one, placement_of(mesh), 3) for of_one in arrays]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_packs", [0, 1, 3])
def test_consumed_gradients_become_the_results(mesh, num_packs, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
    flat, views, arrays = filled_flat(mesh, [(40,), (3, 5), (), (0,)])
    with ExitStack() as guard:
        results = ops.reduce_buffers(views, divisor=3, consume=guard)
    check(results, expected_sums(algorithm, arrays, mesh))
    # With stages an error may come after some packs are reduced: gradients stay unchanged.
    if not ALGORITHMS[algorithm](mesh.devices).in_place:
        assert all(
            same(view.numpy(), array)
            for of_view, of_array in zip(views, arrays, strict=True)
            for view, array in zip(of_view, of_array, strict=True)
        )
        return
    for buffers, given in zip(results, views, strict=True):
        assert [b.address for b in buffers] == [b.address for b in given]
    if num_packs:  # the gaps are zeros as before
        for buffer in flat.buffers:
            content = buffer.numpy()
            assert not content[[55, 57, 58, 59]].any()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_consume_allocates_nothing_where_one_launch_accesses_all_devices(placement):
    with MeshCase(placement).open() as mesh:
        _, views, _ = filled_flat(mesh, [(4000,), (3,)])
        grown = num_grown(mesh)
        with ExitStack() as guard:
            gr.HierarchicalCopyAllReduce().reduce_buffers(views, consume=guard)
        assert num_grown(mesh) == grown


def test_no_gradient_is_no_result(mesh):
    with mesh.journal() as journal:
        assert gr.HierarchicalCopyAllReduce().reduce_buffers([]) == []
    assert journal.records == []


SHAPES = [(5,), (3, 7), (), (16,), (0, 2), (40_000,)]


@pytest.mark.parametrize("wire_dtype", [None, "float16", "float32"])
@pytest.mark.parametrize("peer_access", [True, False])
def test_results_of_unpacked_tensors_do_not_overlap_in_one_allocation(wire_dtype, peer_access):
    """Alternates our memory, read in place, and users' arrays, packed first; two dtypes."""
    with MeshCase((0, 1, 1), peer_access).open() as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 0, mesh=mesh, wire_dtype=wire_dtype)
        values, wanted = [], []
        for turn, shape in enumerate(SHAPES * 2):
            dtype = "float64" if turn % 3 == 1 else "float32"
            arrays = [np.full(shape, turn + 3 * index, dtype) for index in range(3)]
            put = [device.upload if turn % 2 else device.put for device in mesh]
            values.append(gr.PerReplica([of(array) for of, array in zip(put, arrays, strict=True)]))
            wanted.append(np.full(shape, turn + 3, dtype))
        results = ops.batch_reduce(gr.ReduceOp.MEAN, [(value, value) for value in values])
        for value, result, array in zip(values, results, wanted, strict=True):
            for before, after in zip(value.buffers, result.buffers, strict=True):
                assert np.array_equal(after.numpy(), array)
                assert after.dtype == array.dtype
                assert not overlap(before, after)
        for device in range(3):
            mine = [result.buffers[device] for result in results]
            blocks = {id(each.block): each.block for each in mine if each.size}
            assert len(blocks) == 2, "one for each dtype"
            for place, each in enumerate(mine):
                assert not any(overlap(each, other) for other in mine[place + 1 :])
