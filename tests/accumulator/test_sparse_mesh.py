"""A sparse accumulator over a mesh: rows on each device, merged once at the take, in mesh order."""

from __future__ import annotations

import numpy as np
import pytest
from accumulator.kinds import counters
from support.exact_data import FLOATS, exact_data, random_data, same

import gradreduce as gr
from gradreduce.device import accumulate_dtype
from gradreduce.errors import DeviceMismatchError, InvalidArgumentError


@pytest.fixture
def sparse(mesh):
    """Makes sparse accumulators over the mesh."""

    def make(dtype="float32", shape=None, **options):
        return gr.SparseConditionalAccumulator(dtype, shape, device=mesh, **options)

    return make


def gradient(seed, dtype, make=exact_data, row=(3,)):
    """A gradient with other rows for every seed, some of them shared, in any order."""
    indices = np.random.default_rng(seed).integers(0, 12, 1 + seed % 7)
    return gr.IndexedSlices(make((indices.size, *row), dtype, seed=seed), indices)


def row_sums(slices):
    """Rows by index, in the accumulate type; rows of one gradient are added first."""
    found, wide = {}, accumulate_dtype(slices.dtype)
    for index, row in zip(slices.indices.tolist(), slices.values.astype(wide), strict=True):
        found[index] = found[index] + row if index in found else row
    return found


def combined(by_device, dtype, reduction_type):
    """Adds the gradients of each device in order, then the sums of the devices in order."""
    total, counts = {}, {}
    for gradients in by_device:
        partial = {}
        for slices in gradients:
            for index, row in row_sums(slices).items():
                partial[index] = partial[index] + row if index in partial else row
                counts[index] = counts.get(index, 0) + 1
        for index, row in partial.items():
            total[index] = total[index] + row if index in total else row
    found = sorted(total)
    wide = accumulate_dtype(np.dtype(dtype))
    rows = [total[k] / wide.type(counts[k] if reduction_type == "MEAN" else 1) for k in found]
    return found, np.array(rows, wide).astype(dtype)


def check(taken, mesh, by_device, dtype, reduction_type="MEAN"):
    indices, rows = combined(by_device, dtype, reduction_type)
    assert type(taken) is gr.Mirrored
    assert taken.devices == mesh.devices
    for part, device in zip(taken.parts, mesh, strict=True):
        assert part.device is device
        assert part.indices.tolist() == indices
        assert same(part.values.numpy(), rows.reshape(part.values.shape))
    assert len({part.values.address for part in taken.parts}) == len(mesh)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
def test_every_replica_counts_once(sparse, mesh, dtype, reduction_type):
    acc = sparse(dtype, reduction_type=reduction_type)
    size = len(mesh)
    for step, num_applies in enumerate((1, 3)):
        by_device = [[gradient(turn * size + k, dtype, random_data) for turn in range(num_applies)]
                     for k in range(size)]  # fmt: skip
        for turn in range(num_applies):
            grad = gr.PerReplica([each[turn] for each in by_device], mesh)
            assert acc.apply_indexed_slices_grad(grad, step)
        assert counters(acc) == [(num_applies * size, step, 0)]
        with np.errstate(all="ignore"):
            if step:
                check(acc.take_indexed_slices_grad(1), mesh, by_device, dtype, reduction_type)
                continue
            indices, values, shape = acc.take_grad(num_applies * size)
            wanted, rows = combined(by_device, dtype, reduction_type)
            assert (indices.tolist(), shape) == (wanted, (-1, 3))
            assert all(same(buffer.numpy(), rows) for buffer in values.buffers)


def test_a_gradient_from_outside_is_added_on_the_first_device(mesh):
    """For a part of a mesh; and replicas are added to the sum of one device, in order."""
    part, last = mesh[0:1], mesh.devices[-1]
    acc = gr.SparseConditionalAccumulator("float32", device=part, reduction_type="SUM")
    rows = last.put(np.array([[1e8], [1.0]], "float32"))
    assert acc.apply_indexed_slices_grad(gr.IndexedSlices(rows, [4, 2]))
    assert acc.apply_indexed_slices_grad(
        gr.PerReplica([gr.IndexedSlices(np.full((1, 1), value, "float32"), [4])
                       for value in ([1.0, -1e8] + [0.0] * len(mesh))[: len(mesh)]], mesh)
    )  # fmt: skip
    assert acc.num_accumulated() == 1 + len(mesh)
    taken = acc.take_indexed_slices_grad(1)
    (only,) = taken.parts
    assert only.device is mesh.devices[0]
    assert only.indices.tolist() == [2, 4]
    assert only.values.numpy().tolist() == [[1.0], [0.0]]  # (1e8 + 1) - 1e8, as float32 does it
    one = gr.SparseConditionalAccumulator("float32", device=last)
    replicas = [gr.IndexedSlices(np.full((1, 1), k, "float32"), [k % 2]) for k in range(len(mesh))]
    one.apply_indexed_slices_grad(gr.PerReplica(replicas, mesh))
    assert one.num_accumulated() == len(mesh)
    even, odd = range(0, len(mesh), 2), range(1, len(mesh), 2)
    means = [[sum(even) / len(even)], [sum(odd) / len(odd)]]
    assert one.take_grad(1)[1].tolist() == np.array(means, "float32").tolist()


def test_launches(sparse, mesh):
    """One on each GPU for the gradients of all replicas; at the take, one that merges."""
    acc = sparse()
    grad = gr.PerReplica([gradient(k, "float32") for k in range(len(mesh))], mesh)
    num_physical = len(mesh.by_physical)
    for _ in range(2):
        with mesh.journal() as journal:
            acc.apply_indexed_slices_grad(grad)
        launched = [record.name for record in journal.of("launch")]
        assert launched == ["segment_sum"] * num_physical
        assert (journal.uploads, journal.copies, journal.syncs) == (num_physical, 0, 0)
        assert journal.of("fill") == []
    with mesh.journal() as journal:
        acc.take_indexed_slices_grad(1)
    launched = [record.name for record in journal.of("launch")]
    assert launched.count("segment_sum") == 1
    assert launched.count("pack") == 1  # one launch for all that the first device can access
    assert (journal.uploads, journal.syncs) == (1, 0)
    assert journal.of("fill") == []


def test_accumulators_filled_together_share_launches(sparse, mesh):
    """Each is merged alone."""
    accumulators = [sparse() for _ in range(5)]
    grads = [
        gr.PerReplica(
            [gradient(k + turn, "float32", row=(2 + turn,)) for k in range(len(mesh))], mesh
        )
        for turn in range(5)
    ]
    with mesh.journal() as journal:
        gr.apply_grads(accumulators, grads)
    assert journal.launches == len(mesh.by_physical)
    with mesh.journal() as journal:
        taken = gr.take_grads(accumulators, 1)
    launched = [record.name for record in journal.of("launch")]
    assert (launched.count("segment_sum"), journal.uploads, journal.syncs) == (5, 5, 0)
    for each, grad in zip(taken, grads, strict=True):
        by_device = [[gr.IndexedSlices(part.values.numpy(), part.indices)] for part in grad.parts]
        check(each, mesh, by_device, "float32")


def test_replicas_that_do_not_fit_change_nothing(sparse, mesh):
    acc = sparse()
    good = gradient(3, "float32")
    wide = gr.IndexedSlices(np.ones((1, 4), "float32"), [0])
    for last, error, text in [
        (gradient(3, "float64"), ValueError, "the gradient is float64"),
        (wide, InvalidArgumentError, "expected"),
        (np.ones(3, "float32"), TypeError, "expects IndexedSlices"),
    ]:
        grad = gr.PerReplica([*[good] * (len(mesh) - 1), last], mesh)
        with mesh.journal() as journal, pytest.raises(error, match=text):
            acc.apply_indexed_slices_grad(grad)
        assert journal.launches == 0
    with gr.open_mesh(1, backend="sim") as other, pytest.raises(DeviceMismatchError):
        acc.apply_grad([0], other.devices[0].put(np.ones((1, 3), "float32")))
    assert counters(acc) == [(0, 0, 0)]
