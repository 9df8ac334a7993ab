"""Prepared steps: the same bits, launches and copies as the plain call, and nothing else."""

import gc
import sys

import numpy as np
import pytest
from support.exact_data import random_data, same
from support.meshes import MeshCase, refused
from support.reduction_calls import dense

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPES = [((40, 7), "float32"), ((), "float16"), ((0, 2), "float32"), ((9,), "int16"),
          ((30_000,), "float32"), ((5,), "complex64"), ((33,), "bfloat16")]  # fmt: skip


def values_of(mesh, seed=0):
    return [dense(mesh, shape, dtype, seed + place) for place, (shape, dtype) in enumerate(SHAPES)]


def refill(values, seed):
    """Writes other numbers into the same memory; returns the arrays."""
    for place, value in enumerate(values):
        for replica, buffer in enumerate(value.buffers):
            numbers = random_data(buffer.shape, buffer.dtype, seed=seed + 10 * place + replica)
            buffer.device.upload(np.asarray(numbers), out=buffer)


def pairs_of(mesh, values):
    """Most go to their own devices, one to the last, one to the last and the first."""
    ends = list(dict.fromkeys([mesh.devices[-1], mesh.devices[0]]))
    targets = [*values[:-2], ends[:1], ends]
    return list(zip(values, targets, strict=True))


def arrays_of(results):
    return [buffer.numpy() for result in results for buffer in result.buffers]


def calls_of(function):
    """The number of Python and C functions that it calls."""
    found = [0]

    def count(frame, event, argument):
        found[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found[0]


def live_bytes(mesh):
    for device in mesh.devices:
        device.drain()
    return sum(device._pool.live_bytes for device in mesh.devices)


def test_its_memory_is_its_own_and_ends_with_it(numpy_mesh):
    values = values_of(numpy_mesh)
    gc.collect()
    before = live_bytes(numpy_mesh)
    ops = gr.HierarchicalCopyAllReduce(2)
    step = ops.prepare(SUM, pairs_of(numpy_mesh, values))
    first = step()
    kept = [buffer.address for result in first for buffer in result.buffers]
    gc.collect()
    # Memory that the step had freed would be reused by these, and overwritten by the next call.
    others = [
        device.upload(np.full(buffer.shape, 3, buffer.dtype))
        for value in values
        for device, buffer in zip(value.devices, value.buffers, strict=True)
        for _ in range(4)
    ]
    packed = [device.zeros((31_000,), "float32") for device in numpy_mesh.devices for _ in range(4)]
    refill(values, 400)
    assert step() is first is step.results
    assert [buffer.address for result in first for buffer in result.buffers] == kept
    assert all((other.numpy() == 3).all() for other in others)
    assert not any(flat.numpy().any() for flat in packed)
    refill(values, 400)
    wanted = arrays_of(ops.batch_reduce(SUM, pairs_of(numpy_mesh, values)))
    assert all(map(same, arrays_of(step.results), wanted))
    del step, first, others, packed
    gc.collect()
    assert live_bytes(numpy_mesh) == before


def test_what_it_reads_stays_alive(numpy_mesh):
    values = values_of(numpy_mesh)
    wanted = arrays_of(gr.HierarchicalCopyAllReduce().batch_reduce(SUM, [(v, v) for v in values]))
    step = gr.HierarchicalCopyAllReduce().prepare(SUM, [(v, v) for v in values])
    del values
    gc.collect()
    for device in numpy_mesh.devices:
        device.drain()
        device.upload(np.full(40 * 7, np.nan, np.float32))
    assert all(map(same, arrays_of(step()), wanted))


@pytest.mark.parametrize("form", ["prepare", "capture"])
def test_a_failed_device_or_a_closed_mesh_stops_it(form):
    with MeshCase((0, 1)).open() as mesh:
        value = dense(mesh, (4,), "float32", 1)
        step = getattr(gr.HierarchicalCopyAllReduce(), form)(SUM, [(value, value)])
        mesh.devices[1].mark_failed("tested")
        with refused(mesh, BackendUnavailableError, "sim:1 failed"):
            step()
    with pytest.raises(BackendUnavailableError, match="closed"):
        step()


def test_a_replay_that_fails_leaves_no_label_behind(monkeypatch):
    """Later operations must not have its label in the flight record."""
    with gr.open_mesh([0, 1], backend="sim") as mesh:
        value = dense(mesh, (4,), "float32", 1)
        step = gr.HierarchicalCopyAllReduce(mesh=mesh).prepare(SUM, [(value, value)])

        def fails(*_arguments):
            raise MemoryError("no more")

        with monkeypatch.context() as patch:
            patch.setattr(type(mesh.devices[0].scheduler), "submit", fails)
            with pytest.raises(MemoryError):
                step()
        mesh.devices[0].upload(np.zeros(4, np.float32))
        assert mesh.flight_record()[-1].tensors == ""
