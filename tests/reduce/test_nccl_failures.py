"""nccl without memory or without its library fails before the first launch."""

from functools import partial

import numpy as np
import pytest
from support.all_reduce_jobs import make_jobs, reduce_jobs
from support.exact_data import exact_data, same
from support.failing_operations import InjectedError, failing_at
from support.meshes import per_replica, refused

import gradreduce as gr
from gradreduce.device import as_dtype
from gradreduce.errors import BackendUnavailableError

nccl = partial(reduce_jobs, "nccl")


@pytest.mark.parametrize(
    ("dtype", "out", "in_place"),
    [
        ("uint16", "uint16", False),
        ("uint16", "uint16", True),
        ("float32", "float32", False),
        ("float32", "float32", True),
        ("float32", "float16", False),
    ],
)
def test_without_memory_nothing_is_changed(numpy_mesh, dtype, out, in_place):
    mesh = numpy_mesh
    packs = [[exact_data((size,), out, num_terms=9, seed=r).astype(dtype) for r in range(len(mesh))]
             for size in (40, 7)]  # fmt: skip
    allocates = len(mesh.by_physical) > 1 and (dtype == "uint16" or out != dtype)
    num_calls = len(packs) * len(mesh.by_physical) if allocates else 0
    for number in range(1, num_calls + 2):
        jobs = make_jobs(mesh, packs, in_place=in_place, out_dtype=as_dtype(out))
        with failing_at(mesh.devices, number, ["allocate"]):
            if number > num_calls:
                nccl(jobs)
                break
            with refused(mesh, InjectedError, "llocate"):  # the name without its first letter
                nccl(jobs)
        for job, replicas in zip(jobs, packs, strict=True):
            for buffer, array in zip(job.inputs, replicas, strict=True):
                assert same(buffer.numpy(), array)
    for job, replicas in zip(jobs, packs, strict=True):
        wanted = sum(replicas[1:], replicas[0]).astype(out)
        assert all(same(buffer.numpy(), wanted) for buffer in job.outs)


def test_where_the_library_is_missing_nothing_is_changed(numpy_mesh, monkeypatch):
    """One physical device does not need the library; with several it is loaded first."""

    def missing():
        raise BackendUnavailableError("no libnccl")

    mesh = numpy_mesh
    alone = len(mesh.by_physical) == 1
    make = mesh._make_collective
    ops = gr.NcclAllReduce(mesh=mesh)
    arrays = [np.full(40, replica, np.float32) for replica in range(len(mesh))]
    value = per_replica(mesh, arrays.__getitem__, lambda device, array: device.upload(array))
    other = gr.PerReplica([value.buffers[0]])
    variable = gr.Variable(arrays[0], device=mesh)
    optimizer = gr.GradientDescentOptimizer(1)
    optimizer.cross_device_ops = ops
    mesh.mesh_state.compiled_keys.clear()
    monkeypatch.setattr(mesh, "_make_collective", missing)
    for call in (
        lambda: ops.reduce(gr.ReduceOp.SUM, value, value),
        lambda: ops.batch_reduce(gr.ReduceOp.SUM, [(other, other), (value, value)]),
        lambda: ops.all_reduce([[array] for array in arrays]),
        lambda: ops.plan(gr.ReduceOp.SUM, [(other, other), (value, value)]),
        lambda: ops.reduce_buffers([value.buffers]),
        lambda: gr.ConditionalAccumulator("float32", device=mesh),
        lambda: gr.SyncStep([variable], optimizer, ops),
        lambda: optimizer.apply_gradients([(value, variable)]),
    ):
        if alone:
            call()
            continue
        with refused(mesh, BackendUnavailableError, "no libnccl"):
            call()
    gr.HierarchicalCopyAllReduce().reduce(gr.ReduceOp.SUM, value, value)
    assert all(same(b.numpy(), a) for b, a in zip(value.buffers, arrays, strict=True))
    monkeypatch.setattr(mesh, "_make_collective", make)
    reduced = ops.reduce(gr.ReduceOp.SUM, value, value)  # the earlier failure has no effect
    assert (reduced.buffers[-1].numpy() == sum(range(len(mesh)))).all()
