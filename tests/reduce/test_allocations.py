"""Results of tensors that are reduced alone share an allocation and do not overlap."""

from __future__ import annotations

import numpy as np
import pytest
from support.meshes import MeshCase

import gradreduce as gr
from gradreduce.device import overlap

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
