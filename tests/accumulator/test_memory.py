"""The memory of devices and of the process does not grow with the number of cycles."""

import gc
import itertools
import sys

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.errors import DeadlineExceededError

LONG = (pytest.mark.exhaustive, pytest.mark.slow)


def blocks(mesh):
    """Python's memory blocks in use; and each device's memory, allocated and requested."""
    for device in mesh.devices:
        device.drain()
    gc.collect()
    return (
        sys.getallocatedblocks(),
        [(device._pool.grown, device._pool.live_bytes) for device in mesh.devices],
    )


def check_steady(mesh, cycle, num_cycles, warm):
    """Checks that later cycles use as much as the first ones; returns the number of cycles.

    The first cycles fill the record of the last thousand operations. A leak leaves a block in every
    second cycle of every round. Caches of Python and NumPy, and other threads, leave some blocks in
    the first rounds, so a round that left many is run again.
    """
    steps = itertools.count()
    for _ in range(warm):
        cycle(next(steps))
    left = []
    while not left or left[-1] >= (num_cycles - warm) // 3:
        assert len(left) < 6, left
        before = blocks(mesh)
        for _ in range(num_cycles - warm):
            cycle(next(steps))
        after = blocks(mesh)
        assert after[1] == before[1]
        left.append(after[0] - before[0])
    return next(steps)


@pytest.mark.parametrize("num", [800, pytest.param(100_000, marks=LONG)])
def test_many_cycles(num):
    """Two applies and a take; other rows in every cycle; in half of them a drop and a timeout."""
    luck = np.random.default_rng(0)
    given = [
        gr.IndexedSlices(np.ones((size, 3), "float32"), luck.integers(0, 99, size))
        for size in luck.integers(0, 40, 8)
    ]
    with gr.open_mesh(1, backend="sim") as mesh:
        dense = gr.ConditionalAccumulator("float32", (7,), device=mesh.devices[0])
        rows = gr.SparseConditionalAccumulator("float32", device=mesh.devices[0])
        both, grad = [dense, rows], np.ones(7, "float32")

        def cycle(step):
            gr.apply_grads(both, [grad, given[step % 8]], step)
            dense.apply_grad(grad, step)
            rows.apply_indexed_slices_grad(given[luck.integers(8)], step)
            if step % 2:
                dense.take_grad(2)
                rows.take_indexed_slices_grad(2)
                return
            gr.take_grads(both, 2)
            assert not gr.apply_grads(both, [grad, given[0]], step)
            with pytest.raises(DeadlineExceededError):
                gr.take_grads(both, 1, timeout=0)

        assert check_steady(mesh, cycle, num, 300) == dense.global_step == rows.global_step
        assert len(mesh.devices[0].freed) < 10
