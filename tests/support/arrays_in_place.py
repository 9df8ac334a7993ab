"""Reduces users' own arrays with ``num_packs=0``, for tests of every backend."""

from collections.abc import Callable
from typing import Any

import numpy as np
from support.exact_data import exact_data, same
from support.meshes import launches_of

import gradreduce as gr
from gradreduce.device import Device, Mesh

__all__ = ["check_reduced_in_place"]

SHAPES = [(3, 5), (7,), (), (0, 2), (4000,)]


def check_reduced_in_place(
    mesh: Mesh,
    algorithm: str,
    dtype: str,
    array_on: Callable[[Device, np.ndarray], Any],
    overwrite: Callable[[Any], None],
    num_moved: int,
) -> None:
    """Sums arrays that are overwritten as soon as the call has returned.

    Args:
        mesh: the mesh.
        algorithm: the name of the algorithm.
        dtype: the dtype of the arrays.
        array_on: makes the user's array on a device.
        overwrite: overwrites an array, on the stream of its library.
        num_moved: the expected number of launches that pack.
    """
    hosts = [
        [exact_data(shape, dtype, seed=9 * index + place) for place, shape in enumerate(SHAPES)]
        for index in range(len(mesh))
    ]
    grads = [
        [array_on(device, host) for host in row] for device, row in zip(mesh, hosts, strict=True)
    ]
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs=0, mesh=mesh)
    with mesh.journal() as journal:
        reduced = ops.all_reduce(grads, gr.ReduceOp.SUM, output_type="buffer")
    for array in [each for row in grads for each in row]:
        overwrite(array)
    del grads, array
    assert len(launches_of(journal, "pack")) == num_moved
    for column, results in zip(zip(*hosts, strict=True), zip(*reduced, strict=True), strict=True):
        wanted = sum(column[1:], column[0]).astype(column[0].dtype)
        for result in results:
            assert same(result.numpy(), wanted)
