"""A GPU whose memory runs out, shared by eight logical devices."""

import gc

import numpy as np
import pytest
from device.contract import data
from support.hanging_devices import wait_for_failure

import gradreduce as gr
from gradreduce.device import Mesh

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def free_bytes() -> int:
    import cupy

    return cupy.cuda.runtime.memGetInfo()[0]


def usable_bytes() -> int:
    """Bytes that the tests may use: the free memory minus 1 GiB, or an eighth of little memory."""
    gc.collect()  # memory of other tests
    free = free_bytes()
    return free - min(free // 8, 1024 * MIB)


def check_usable(mesh: Mesh) -> None:
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    grads = [[device.upload(np.full(9, 1.0 + device.index, np.float32))] for device in mesh]
    rows = ops.all_reduce(grads, op=gr.ReduceOp.SUM, output_type="buffer")
    assert [row[0].numpy()[8] for row in rows] == [len(mesh) * (len(mesh) + 1) / 2] * len(mesh)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_memory_that_one_of_eight_devices_freed_is_available_to_the_others(gpus, seed):
    """Also memory that the queue of another device still reads at the allocation."""
    gpus(seed, num_gpus=1, capacity=8 * MIB)
    with gr.open_mesh([0] * 8, backend="cuda") as mesh:
        first, second, third = mesh.devices[:3]
        check_usable(mesh)
        size = usable_bytes() // 8 * 8
        filled = [first.empty((size // 2,), "uint8") for _ in range(2)]
        small = first.upload(data((256,)), out=filled[0].view(0, (256,), np.dtype("float32")))
        read = third.empty((256,), "float32")
        third.copy(read, small)
        del filled, small
        kept = second.zeros((size,), "uint8")
        assert (read.numpy() == data((256,))).all()
        assert not kept.view(0, (256,), np.dtype("float32")).numpy().any()
        check_usable(mesh)


def test_a_gpu_that_is_full_says_so_and_the_mesh_stays_usable(gpus):
    gpus(2, num_gpus=1, capacity=8 * MIB)
    with gr.open_mesh([0] * 8, backend="cuda") as mesh:
        check_usable(mesh)
        size = usable_bytes() // 8
        kept = [device.empty((size,), "uint8") for device in mesh]
        says = rf"cuda:1: GPU 0 cannot allocate {size:,} bytes: .* are free, this mesh holds"
        with pytest.raises(MemoryError, match=says):
            while len(kept) < 16:
                kept.append(mesh.devices[1].empty((size,), "uint8"))
        check_usable(mesh)
        kept.clear()
        mesh.devices[1].empty((8 * size,), "uint8")
        check_usable(mesh)


@pytest.mark.parametrize("end", ["closed", "failed", "dropped"])
def test_the_memory_of_an_ended_mesh_is_free_for_others(gpus, end):
    """At once, without the garbage collector, unless the mesh is dropped without ``close``."""
    gpus(2, num_gpus=1, capacity=8 * MIB)
    with gr.open_mesh(1, backend="cuda"):  # makes the context
        size = usable_bytes() // 4
    before = free_bytes()
    gc.disable()
    try:
        mesh = gr.open_mesh([0, 0], backend="cuda")
        kept = mesh.devices[0].empty((size,), "uint8")
        mesh.devices[1].zeros((2 * size,), "uint8")
        part = mesh.devices[1].empty((size // 2,), "uint8")  # of an allocation; the rest is free
        check_usable(mesh)
        if end == "failed":
            mesh.mesh_state.fail("for a test")
            wait_for_failure(mesh)
        if end == "dropped":
            del kept, part, mesh
            gc.collect()
        else:
            mesh.close()
            mesh.close()  # does nothing
            assert before - free_bytes() >= 3 * size
            del kept
            assert before - free_bytes() < 2.5 * size
            del part
        assert before - free_bytes() < size // 4
    finally:
        gc.enable()
