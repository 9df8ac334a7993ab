"""Calls of every kind of reduction across devices, the same on every mesh."""

from collections.abc import Iterable, Iterator

import numpy as np
from support.exact_data import random_data

import gradreduce as gr
from gradreduce.device import Buffer, Mesh

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPES = [(33, 7), (5,), (), (40, 45)]


def everything(mesh: Mesh, algorithm: str) -> list[np.ndarray]:
    """All arrays of all results. The inputs are freed right after each call."""
    ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh)
    one = gr.ReductionToOneDevice(mesh.devices[len(mesh) // 2], mesh=mesh)
    kept = []
    for op in (SUM, MEAN):
        kept += ops.batch_reduce(op, pairs_of(mesh, 0))
        kept += ops.batch_reduce(op, pairs_of(mesh, 10), coalesce=True)
        kept += one.batch_reduce(op, pairs_of(mesh, 20))
    source = mesh.devices[-1].upload(data((5, 3), "float32", 0))
    kept.append(ops.broadcast(source, mesh))
    kept.append(ops.broadcast(table(mesh.devices[0], 1), mesh.devices[::-1]))
    outs = [device.empty((5, 3), "float32") for device in mesh]
    kept += ops.broadcast([source], mesh, out=[outs])
    del source, outs
    return [array for result in kept[::-1] for array in arrays_of(result)]


def pairs_of(mesh: Mesh, seed: int) -> list[tuple[gr.PerReplica, object]]:
    """Dense and sparse values of several dtypes, each with a destination of one or more devices."""
    first, last = mesh.devices[0], mesh.devices[-1]
    values = [
        dense(mesh, (40, 7), "float32", seed),
        dense(mesh, (9,), "int16", seed),
        dense(mesh, (3,), "float16", seed),
        gr.PerReplica([table(device, seed + device.index) for device in mesh]),
        gr.PerReplica([table(first, seed), *dense(mesh, (6, 3), "float32", seed).buffers[1:]]),
    ]
    destinations = [mesh, last, [last, first] if first is not last else [first], mesh, first]
    turned = destinations[1:] + destinations[:1]
    return [*zip(values, destinations, strict=True), *zip(values, turned, strict=True)]


def dense(mesh: Mesh, shape, dtype, seed: int) -> gr.PerReplica:
    return gr.PerReplica(
        [device.upload(data(shape, dtype, seed + 7 * device.index)) for device in mesh], mesh
    )


def read(buffers: Iterable[Buffer]) -> list[np.ndarray]:
    return [buffer.numpy() for buffer in reversed(list(buffers))]


def overwrite(*lists: Iterable[Buffer]) -> None:
    for buffer in [each for buffers in lists for each in buffers]:
        buffer.device.upload(np.full(buffer.shape, 9, buffer.dtype), out=buffer)


def on_each(mesh: Mesh, shape, dtype="float32", seed: int = 0) -> list[Buffer]:
    return dense(mesh, shape, dtype, seed).buffers


def on_one_gpu(mesh: Mesh) -> Mesh:
    """The devices of the GPU that has the most."""
    return mesh[list(max(mesh.by_physical.values(), key=len))]


def table(device, seed: int) -> gr.IndexedSlices:
    """Rows of a (6, 3) array; indices repeat, and every third result is empty."""
    count = seed % 3 * 2
    rows = device.upload(data((count, 3), "float32", seed))
    return gr.IndexedSlices(rows, (np.arange(count) * 5 + seed) % 4, (6, 3))


def data(shape, dtype, seed: int) -> np.ndarray:
    return random_data(shape, dtype, seed=seed)


def arrays_of(result: gr.Mirrored) -> Iterator[np.ndarray]:
    """The arrays of a value, with those of the last device first.

    Reading a device's memory waits for its queue, which could hide a missing wait. So the first
    device of a GPU, which launches for the others, is read after them.
    """
    for part in result.parts[::-1]:
        if isinstance(part, gr.IndexedSlices):
            yield part.indices
            yield part.values.numpy()
        else:
            yield part.numpy()
