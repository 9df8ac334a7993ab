"""IndexedSlices across devices: rows of all replicas in their order; merged on request."""

from itertools import product

import numpy as np
import pytest
from support import meshes
from support.exact_data import exact_data, random_data, same
from support.meshes import check_mirrored, hierarchical_sum, owned, refused

import gradreduce as gr
from gradreduce.device import accumulate_dtype, as_dtype, mean_dtype
from gradreduce.errors import InvalidArgumentError

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
ROWS = 10

MAKERS = {
    "nccl": lambda mesh: gr.NcclAllReduce(mesh=mesh),
    "hierarchical_copy": lambda mesh: gr.HierarchicalCopyAllReduce(mesh=mesh),
    "one device": lambda mesh: gr.ReductionToOneDevice(mesh=mesh),
}

mesh = meshes.mesh_of((0, 0, 1), strict=True)


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def ops(request, numpy_mesh):
    return request.param(numpy_mesh)


def rows_of(replica: int, dtype="float32") -> tuple[np.ndarray, np.ndarray]:
    """Another number of rows on each replica, none on the second; with repeated indices."""
    count = 0 if replica == 1 else replica + 2
    indices = (np.arange(count) * (replica + 3)) % 4
    return random_data((count, 3), dtype, seed=replica), indices


def slices_of(replica: int, dtype="float32", dense_shape=(ROWS, 3)) -> gr.IndexedSlices:
    return gr.IndexedSlices(*rows_of(replica, dtype), dense_shape)


def value_of(mesh, dtype="float32"):
    return gr.PerReplica([slices_of(replica, dtype) for replica in range(len(mesh))], mesh)


def same_rows(part, rows, indices, dense_shape=(ROWS, 3)):
    assert isinstance(part, gr.IndexedSlices)
    assert part.indices.tolist() == list(indices)
    assert part.dense_shape == dense_shape
    return same(part.values.numpy() if hasattr(part.values, "numpy") else part.values, rows)


def merged(rows, indices):
    """Adds rows of the same index in their order: in the accumulate type; integers wrap."""
    wide, sums = accumulate_dtype(rows.dtype), {}
    for index, row in zip(indices, rows.astype(wide), strict=True):
        sums[index] = sums[index] + row if index in sums else row
    return np.array([sums[index] for index in sorted(sums)], wide).reshape(-1, 3), sorted(sums)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint16", "int64", "uint32"]
)
def test_rows_of_all_replicas_are_in_their_order(numpy_mesh, ops, dtype):
    count = len(numpy_mesh)
    all_rows = [rows_of(replica, dtype) for replica in range(count)]
    joined = tuple(np.concatenate(each) for each in zip(*all_rows, strict=True))
    value = value_of(numpy_mesh, dtype)
    dense = [exact_data((2, 2), "float32", seed=replica) for replica in range(count)]
    plain = gr.PerReplica(dense, numpy_mesh)
    for op, coalesce in product((SUM, MEAN), (False, True)):
        with np.errstate(all="ignore"):
            rows, indices = merged(*joined) if coalesce else joined
            made = as_dtype(dtype)
            if op is MEAN:
                made = mean_dtype(made)
                wide = accumulate_dtype(made)
                rows = rows.astype(wide) / wide.type(count)
            expected = rows.astype(made)
        for destination in (numpy_mesh, "sim:0", [f"sim:{count - 1}"]):
            pairs = [(plain, plain), (value, destination)]
            added, found = ops.batch_reduce(op, pairs, coalesce=coalesce)
            check_mirrored(added, hierarchical_sum(dense, count if op is MEAN else 1))
            assert len(found.devices) == (count if destination is numpy_mesh else 1)
            for part in (*found.parts, *found.values):
                assert same_rows(part, expected, indices)
    assert all(map(same, [part.values.numpy() for part in value.parts], [r for r, _ in all_rows]))


def test_no_result_is_an_input_nor_written_by_a_later_call(numpy_mesh, ops):
    """Also if one replica has all rows, and if rows are only copied."""
    mesh, kept = numpy_mesh, []
    for rich in {0, len(mesh) - 1}:
        counts = [3 if replica == rich else 0 for replica in range(len(mesh))]
        arrays = [random_data((count, 2), "float32") for count in counts]
        rows = list(map(owned, mesh, arrays))
        value = gr.PerReplica([gr.IndexedSlices(b, [1, 0, 1][: b.shape[0]], (4, 2)) for b in rows])
        found = [
            ops.reduce(op, value, destination, coalesce=coalesce)
            for op in (SUM, MEAN)
            for destination in (mesh, mesh.devices[rich], mesh.devices[0])
            for coalesce in (False, True)
        ]
        found += [ops.broadcast(value.parts[rich], mesh), ops.reduce(SUM, value.parts[rich], mesh)]
        parts = [part.values for each in found for part in each.parts]
        assert len({part.block for part in [*parts, *rows]}) == len(parts) + len(rows)
        assert all(map(same, [buffer.numpy() for buffer in rows], arrays))
        kept += [(part, part.numpy()) for part in parts]
    assert all(same(part.numpy(), array) for part, array in kept)


def test_sparse_and_dense_replicas_make_a_dense_sum(numpy_mesh, ops):
    if len(numpy_mesh) == 1:
        return
    arrays = [exact_data((ROWS, 3), "float32", seed=k) for k in range(len(numpy_mesh))]
    table = gr.IndexedSlices(exact_data((4, 3), "float32", seed=77), [1, 9, 1, 0], (ROWS, 3))
    for sparse_replica in (0, 1):
        parts, wanted = arrays.copy(), arrays.copy()
        parts[sparse_replica], wanted[sparse_replica] = table, table.to_dense()
        found = ops.reduce(MEAN, gr.PerReplica(parts, numpy_mesh), numpy_mesh)
        check_mirrored(found, hierarchical_sum(wanted, len(wanted)))


@pytest.mark.parametrize("dense_shape", [None, (-1, 3), (ROWS, 3)])
def test_the_dense_shape_is_that_of_the_first_replica(mesh, dense_shape):
    parts = [slices_of(0, dense_shape=dense_shape), slices_of(1), slices_of(2, dense_shape=None)]
    found = gr.NcclAllReduce().reduce(SUM, gr.PerReplica(parts, mesh), mesh)
    assert {part.dense_shape for part in found.parts} == {dense_shape}


def test_a_single_one_is_its_own_replica(mesh):
    table, ops = slices_of(2), gr.NcclAllReduce(mesh=mesh)
    on_device = gr.IndexedSlices(mesh.devices[0].put(table.values), table.indices, (ROWS, 3))
    for given in (table, on_device):
        found = ops.reduce(MEAN, given, ["sim:2", "sim:0"])
        spread = ops.broadcast(given, mesh)
        assert len(spread.parts) == 3
        parts = [*found.parts, *spread.parts]
        assert all(same_rows(part, table.values, table.indices) for part in parts)
        kind = type(given.values)  # an array or a Buffer, and so are the results
        assert all(type(each.values) is kind for each in (*found.values, *spread.values))


def test_a_value_of_slices_shows_them(mesh):
    value = value_of(mesh)
    assert value.is_sparse
    assert value.devices == mesh.devices
    assert [type(part.values) for part in value.values] == [np.ndarray] * 3
    assert value.primary.indices.tolist() == rows_of(0)[1].tolist()
    assert value.get(mesh.devices[2]).dense_shape == (ROWS, 3)
    assert repr(value).startswith("PerReplica(sim:0: 2 rows of float32[10, 3], sim:1: 0 rows of")
    with pytest.raises(TypeError, match="contains IndexedSlices"):
        _ = value.buffers


def test_replicas_that_differ(mesh):
    good = value_of(mesh)
    wide = gr.IndexedSlices(np.ones((1, 4), np.float32), [0])
    for odd, error, text in (
        (slices_of(1, "float64"), ValueError, r"is float64\[3\] rows, replica 0 is float32\[3\]"),
        (wide, ValueError, r"is float32\[4\] rows, replica 0 is float32\[3\] rows"),
        (gr.IndexedSlices(np.ones((1, 3), np.float32), [ROWS]), InvalidArgumentError,
         r": indices\[0\] = 10 is not below dense_shape\[0\] = 10"),
        (np.ones((ROWS, 4), np.float32), ValueError, r"is float32\[10, 4\], replica 0 is"),
        (np.ones((ROWS, 3), np.float32), ValueError,
         r"is float32\[10, 3\], replica 0 is float32\[\?\] rows of an array"),
    ):  # fmt: skip
        first = slices_of(0, dense_shape=None if "?" in text else (ROWS, 3))
        value = gr.PerReplica([first, odd, slices_of(2)], mesh)
        for ops in (gr.NcclAllReduce(), gr.ReductionToOneDevice()):
            with refused(mesh, error, f"value 1: replica 1 ?{text}"):
                ops.batch_reduce(SUM, [(good, good), (value, mesh)])
