"""Prepared steps: the same bits, launches and copies as the plain call, and nothing else."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest
from support import meshes
from support.exact_data import random_data, same
from support.meshes import MeshCase, num_grown, refused
from support.reduction_calls import dense, table

import gradreduce as gr
from gradreduce.device import as_dtype
from gradreduce.errors import BackendUnavailableError

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPES = [((40, 7), "float32"), ((), "float16"), ((0, 2), "float32"), ((9,), "int16"),
          ((30_000,), "float32"), ((5,), "complex64"), ((33,), "bfloat16")]  # fmt: skip

numpy_mesh = meshes.numpy_mesh


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


SETTINGS = {
    "nccl": {"all_reduce_alg": "nccl"},
    "three packs": {"all_reduce_alg": "hierarchical_copy", "num_packs": 3},
    "no packs": {"all_reduce_alg": "hierarchical_copy", "num_packs": 0},
}


@pytest.mark.parametrize("op", [SUM, MEAN])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_each_call_is_a_batch_reduce_of_what_the_arrays_hold(numpy_mesh, settings, op):
    check_calls(numpy_mesh, settings, op)


@pytest.mark.host
@pytest.mark.parametrize("placement", [(0, 0), (0, 1, 1, 2, 0)], ids=str)
def test_each_call_is_a_batch_reduce_with_compiled_kernels_too(placement):
    with MeshCase(placement, implementation="compiled").open() as mesh:
        check_calls(mesh, SETTINGS["three packs"], MEAN)


def check_calls(mesh, settings, op):
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, **settings)
    values = values_of(mesh)
    pairs = pairs_of(mesh, values)
    step = ops.prepare(op, pairs)
    for seed in (100, 200, 300):
        refill(values, seed)
        before = [buffer.numpy() for value in values for buffer in value.buffers]
        with mesh.journal() as journal:
            found = step()
        plain = ops.batch_reduce(op, pairs)
        assert all(map(same, arrays_of(found), arrays_of(plain)))
        assert [each.devices for each in found] == [each.devices for each in plain]
        plan = ops.plan(op, pairs)
        assert (journal.launches, journal.copies) == (plan.launches, plan.copies)
        assert len(journal.of("collective")) == plan.collectives
        assert (journal.bytes, journal.uploads, journal.syncs) == (plan.bytes, 0, 0)
        after = [buffer.numpy() for value in values for buffer in value.buffers]
        assert all(map(same, after, before))


def test_a_call_asks_for_no_memory_and_gives_the_same_arrays(numpy_mesh):
    values = values_of(numpy_mesh)
    step = gr.HierarchicalCopyAllReduce().prepare(MEAN, pairs_of(numpy_mesh, values))
    grown, live = num_grown(numpy_mesh), live_bytes(numpy_mesh)
    first = step()
    kept = [buffer.address for result in first for buffer in result.buffers]
    for _ in range(5):
        again = step()
        assert again is first is step.results
    assert [buffer.address for result in again for buffer in result.buffers] == kept
    assert (num_grown(numpy_mesh), live_bytes(numpy_mesh)) == (grown, live)


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
    step()
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
    step()
    assert all((other.numpy() == 3).all() for other in others)
    assert not any(flat.numpy().any() for flat in packed)
    refill(values, 400)
    wanted = arrays_of(ops.batch_reduce(SUM, pairs_of(numpy_mesh, values)))
    assert all(map(same, arrays_of(step.results), wanted))
    del step, others, packed
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


def test_views_of_a_flat_buffer_need_no_packing():
    with MeshCase((0, 0, 1, 1)).open() as mesh:
        flat = mesh.flat_buffer([(3, 2), (50,)], "float32")
        values = [gr.PerReplica(views) for views in zip(*flat.views, strict=True)]
        step = gr.HierarchicalCopyAllReduce().prepare(SUM, [(value, value) for value in values])
        refill(values, 5)
        with mesh.journal() as journal:
            found = step()
        plain = gr.HierarchicalCopyAllReduce().batch_reduce(SUM, [(v, v) for v in values])
        assert journal.launches == 1
        assert all(map(same, arrays_of(found), arrays_of(plain)))


def test_threads_take_turns():
    with MeshCase((0, 1, 1)).open() as mesh:
        values = values_of(mesh)
        pairs = [(value, value) for value in values]
        ops = gr.HierarchicalCopyAllReduce()
        steps = [ops.prepare(SUM, pairs), ops.prepare(MEAN, pairs)]
        barrier, failed = threading.Barrier(6), []

        def work(step):
            try:
                barrier.wait(10)
                for _ in range(50):
                    step()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(steps[k % 2],)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failed
        for step, op in zip(steps, (SUM, MEAN), strict=True):
            assert all(map(same, arrays_of(step.results), arrays_of(ops.batch_reduce(op, pairs))))


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


def test_what_cannot_be_read_again_is_refused():
    with MeshCase((0, 1)).open() as mesh, MeshCase((0, 1)).open() as other:
        ops = gr.NcclAllReduce(mesh=mesh)
        value = dense(mesh, (4,), "float32", 1)
        sparse = gr.PerReplica([table(device, 1) for device in mesh])
        apart = dense(other, (4,), "float32", 1)
        for pairs, text in (
            ([], "there is no tensor to reduce"),
            ([(value, value), (apart, apart)], "these are on 2"),
            ([(sparse, sparse)], "value 0 contains IndexedSlices"),
            ([(value, "sim:8")], "destination 0"),
        ):
            with refused(mesh, ValueError, text):
                ops.prepare(SUM, pairs)
        with refused(mesh, ValueError, "reduce_op="):
            ops.prepare("sum", [(value, value)])


def test_dtypes_of_the_results_are_those_of_the_plain_call():
    with MeshCase((0, 0)).open() as mesh:
        value = dense(mesh, (4,), "int16", 1)
        step = gr.NcclAllReduce().prepare(MEAN, [(value, value)])
        assert step()[0].buffers[0].dtype == as_dtype("float32")


def test_a_replay_that_fails_leaves_no_label_behind(monkeypatch):
    """Later operations must not have its label in the flight record."""
    with gr.open_mesh([0, 1], backend="sim") as mesh:
        value = gr.PerReplica([device.zeros((4,), "float32") for device in mesh])
        step = gr.HierarchicalCopyAllReduce(mesh=mesh).prepare(gr.ReduceOp.SUM, [(value, value)])

        def fails(*_arguments):
            raise MemoryError("no more")

        with monkeypatch.context() as patch:
            patch.setattr(type(mesh.devices[0].scheduler), "submit", fails)
            with pytest.raises(MemoryError):
                step()
        mesh.devices[0].upload(np.zeros(4, np.float32))
        assert mesh.flight_record()[-1].tensors == ""
