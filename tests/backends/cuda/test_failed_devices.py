"""Errors of a failed GPU: our message contains CUDA's message."""

from dataclasses import replace

import cupy
import numpy as np
import pytest
from device.contract import FLOAT, SIZE, add, data, uploaded
from fake_cupy import surface
from support.exact_data import same

import gradreduce as gr
from gradreduce.backends import open_mesh
from gradreduce.errors import BackendUnavailableError
from gradreduce.ops.add_n import ADD_N

pytestmark = pytest.mark.fake_cupy
ILLEGAL = "cudaErrorIllegalAddress: an illegal memory access was encountered"


def kill(here, gpu: int, status: int = 700) -> None:
    here.freed[gpu] = surface.CUDARuntimeError(ILLEGAL, status)


USES = {
    "download": lambda device, buffer: buffer.numpy(),
    "upload": lambda device, buffer: device.upload(data((SIZE,))),
    "zeros": lambda device, buffer: device.zeros((SIZE,), FLOAT),
    "copy": lambda device, buffer: device.copy(device.empty((SIZE,), FLOAT), buffer),
    "launch": lambda device, buffer: add(device, buffer, buffer),
    "compile": lambda device, buffer: device.compile_kernel(replace(ADD_N), ADD_N.templates[0]),
    "mark": lambda device, buffer: device.queue_mark(),
    "synchronize": lambda device, buffer: device.synchronize(),
    "release": lambda device, buffer: device.release(buffer, cupy.cuda.get_current_stream(1).ptr),
}


@pytest.mark.parametrize("use", USES)
def test_the_call_that_finds_a_failed_gpu_and_every_later_one_raise(here, use):
    mesh = open_mesh([0, 1, 1], backend="cuda")
    device = mesh.devices[1]
    buffer = uploaded(device, 1)
    gr.add_n([buffer, buffer])
    device.synchronize()
    kill(here, 1)
    says, raised = ILLEGAL, surface.CUDARuntimeError
    if use in ("launch", "compile"):
        says, raised = "CUDA_ERROR_700: ", surface.CUDADriverError
    with pytest.raises(BackendUnavailableError, match=f"device cuda:1 failed: {says}") as got:
        USES[use](device, buffer)
    assert isinstance(got.value.__cause__, raised)
    here.freed.clear()  # CUDA would return the same error; we do not ask again
    with pytest.raises(BackendUnavailableError, match="device cuda:2 failed"):
        mesh.devices[2].empty((SIZE,), FLOAT)
    assert same(uploaded(mesh.devices[0], 3).numpy(), data((SIZE,), seed=3))
    kill(here, 1)
    mesh.close()  # does not wait for failed devices
    here.freed.clear()


# After these, CUDA's headers say, every later call fails likewise.
STICKY = (226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)
# Out of memory, busy, a launch out of resources, peers, memory not registered, too many blocks.
PASSING = (2, 46, 701, 704, 711, 712, 713, 720, 801)


@pytest.mark.parametrize("use", ["launch", "mark", "zeros"])
def test_sticky_errors_fail_the_gpu_and_other_errors_do_not(gpus, use):
    here = gpus(1, num_gpus=1)
    for status in (*STICKY, *PASSING):
        with open_mesh(1, backend="cuda") as mesh:
            buffer = uploaded(mesh.devices[0], 1)
            kill(here, 0, status)
            with pytest.raises(RuntimeError):
                USES[use](mesh.devices[0], buffer)
            assert (0 in mesh.mesh_state.failed) == (status in STICKY), status
            here.freed.clear()
            if status in PASSING:  # the GPU works on
                assert same(mesh.devices[0].zeros((2,), FLOAT).numpy(), np.zeros(2, np.float32))
