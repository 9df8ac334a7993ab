"""all_reduce: results have the structure of the gradients; all are reduced in one batch."""

import numpy as np
import pytest
from support.exact_data import exact_data, same
from support.meshes import (
    MeshCase,
    hierarchical_sum,
    launches_of,
    refused,
    unchanged,
)

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


def test_the_one_line_call(monkeypatch):
    grads = [{"w": np.float32([1.0, 2.0**-20]) + replica} for replica in range(4)]
    with MeshCase((0, 1, 1, 2)).open() as mesh:
        results = gr.all_reduce(grads, mesh=mesh)
        assert all(same(entry["w"], np.float32([2.5, 1.5 + 2.0**-20])) for entry in results)
        (results, *_) = gr.all_reduce(grads, mesh=mesh, wire_dtype="float16")
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, wire_dtype="float16")
        assert same(results["w"], ops.all_reduce(grads)[0]["w"])
        assert results["w"].tolist() == [2.5, 1.5]
        with refused(mesh, ValueError, "wire_dtype='int8' is not"):
            gr.all_reduce(grads, mesh=mesh, wire_dtype="int8")
        monkeypatch.setattr("gradreduce.backends._default", [mesh])
        results = gr.all_reduce(grads, SUM)
        assert all(same(entry["w"], np.float32([10, 6 + 2.0**-18])) for entry in results)


def test_tensors_without_a_gradient_stay_none(mesh):
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    arrays = [exact_data((5,), "float32", seed=replica) for replica in range(len(mesh))]
    total = hierarchical_sum(arrays)
    for one, two in ops.all_reduce([[None, array] for array in arrays], SUM):
        assert one is None
        assert same(two, total)
    assert ops.all_reduce([(None,)] * len(mesh)) == [(None,)] * len(mesh)
    out = [{"a": 3, "b": np.empty(5, np.float32)} for _ in mesh]  # its "a" is not changed
    found = ops.all_reduce([{"b": array, "a": None} for array in arrays], SUM, out=out)
    assert found is out
    assert all(entry["a"] == 3 and same(entry["b"], total) for entry in found)
    if len(mesh) > 6:
        some = [[array if replica == 6 else None] for replica, array in enumerate(arrays)]
        why = r"^grads\[0, 1, 2, 3, 4 and \d more\]\[0\] is None, but grads\[6\]\[0\] is not: pass"
        with refused(mesh, ValueError, why):
            ops.all_reduce(some)


# Three tensors of float32 and two of float16, in one batch: launches by kernel, and collectives.
# hierarchical_copy: one pack launch for each physical device and dtype; two small packs, in turn.
# nccl: one pack launch the same; a fold and a fan-out for each physical device and dtype.
@pytest.mark.parametrize(
    ("placement", "algorithm", "packs", "sums", "collectives"),
    [
        ((0,) * 4, "hierarchical_copy", 2, 2, 0),
        ((0,) * 4, "nccl", 2, 2, 0),
        ((0, 0, 1, 1), "hierarchical_copy", 4, 2, 0),
        ((0, 0, 1, 1), "nccl", 4, 8, 4),
        ((0, 1, 2, 3), "hierarchical_copy", 8, 2, 0),
        ((0, 1, 2, 3), "nccl", 8, 8, 8),
    ],
    ids=str,
)
def test_all_tensors_are_reduced_in_one_batch(placement, algorithm, packs, sums, collectives):
    dtypes = ["float32", "float16", "float32", "float32", "float16"]
    grads = [[np.ones(5, dtype) for dtype in dtypes] for _ in placement]
    with MeshCase(placement).open() as mesh, mesh.journal() as journal:
        gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh).all_reduce(grads)
    assert len(launches_of(journal, "pack")) == packs
    assert len(launches_of(journal, "all_sum")) == sums
    assert len(journal.of("collective")) == collectives
    assert len(journal.records) == packs + sums + collectives  # no copy, no upload, no sync


def with_axis_order(array, order=(0, 2, 3, 1)):
    """The same values with another order of axes in memory, such as channels_last."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return np.ascontiguousarray(array.transpose(order)).transpose(back)


def channels(replica):
    return with_axis_order(exact_data((2, 3, 4, 5), "float32", seed=replica))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dense_arrays_of_the_same_strides_are_reduced_in_memory_order(mesh, algorithm):
    """Results have these strides too, also in place; no array is copied."""
    ops, count = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh), len(mesh)
    grads = [{"x": channels(k), "y": np.ones((3, 4), "f2", order="F")} for k in range(count)]
    out = [
        {"x": with_axis_order(np.zeros((2, 3, 4, 5), "f4")), "y": np.zeros((4, 3), "f2").T}
        for _ in mesh
    ]
    wanted = hierarchical_sum([entry["x"] for entry in grads], count)
    with unchanged(*(entry["x"] for entry in grads)):
        found = ops.all_reduce(grads)
    for into in (out, grads):
        plain, plain_out = (
            [{key: np.ascontiguousarray(each) for key, each in entry.items()} for entry in rows]
            for rows in (grads, out)
        )
        with mesh.journal() as journal:
            assert ops.all_reduce(grads, out=into) is into
        with mesh.journal() as in_order:
            ops.all_reduce(plain, out=plain if into is grads else plain_out)
        names = [[record.name for record in each.records] for each in (journal, in_order)]
        assert names[0] == names[1]
    for entry in (*found, *out, *grads):
        assert same(np.ascontiguousarray(entry["x"]), np.ascontiguousarray(wanted))
        assert entry["x"].strides == channels(0).strides
        assert (entry["y"] == 1).all()
        assert entry["y"].flags.f_contiguous


def test_a_value_in_another_memory_order_has_parts_of_its_own_shape(numpy_mesh):
    arrays = [channels(replica) for replica in range(len(numpy_mesh))]
    strides, wanted = arrays[0].strides, np.ascontiguousarray(hierarchical_sum(arrays))
    value = gr.PerReplica(arrays, numpy_mesh)
    assert all(same(one, other) for one, other in zip(value.values, arrays, strict=True))
    assert [buffer.shape for buffer in value.buffers] == [(2, 3, 4, 5)] * len(arrays)
    ops = gr.HierarchicalCopyAllReduce(mesh=numpy_mesh)
    (total,) = ops.batch_reduce(SUM, [(value, value)])
    assert value[0].strides == total.primary.strides == strides
    assert "float32[2, 3, 4, 5]" in repr(value) and "float32[2, 3, 4, 5]" in repr(total)
    (again,) = ops.batch_reduce(SUM, [(value, value)], output_type="buffer")
    for found in (total.buffers[-1].numpy(), np.ascontiguousarray(total.primary),
                  again.primary.numpy()):  # fmt: skip
        assert same(found, wanted)
    step = ops.prepare(SUM, [((v := gr.PerReplica(arrays, numpy_mesh)), v)], out=[v])
    for array in arrays:
        array[...] = 2
    (found,) = step()
    assert all((array == 2 * len(arrays)).all() for array in (found.values[-1], arrays[0]))
    (copy,) = ops.broadcast([arrays[0]], numpy_mesh)
    assert copy.primary.strides == strides
    into = [np.zeros((2, 3, 4, 5), "f4") for _ in arrays]
    ops.broadcast(arrays[0], numpy_mesh, out=into)
    assert all((each == arrays[0]).all() for each in (copy.primary, *into))
