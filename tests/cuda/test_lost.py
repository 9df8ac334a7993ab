"""A GPU that dies is lost in our words, with CUDA's own inside."""

from __future__ import annotations

import cupy
import numpy as np
import pytest
from device.contract import FLOAT, SIZE, data, uploaded
from exact import same
from fake_cupy import surface

import gradreduce as gr
from gradreduce.device import open_mesh
from gradreduce.device.cuda import FATAL
from gradreduce.errors import BackendUnavailableError

pytestmark = pytest.mark.fake_cupy
ILLEGAL = "cudaErrorIllegalAddress: an illegal memory access was encountered"


@pytest.fixture(params=[0, 1, 2])
def here(request, new_machine):
    return new_machine(request.param, num_gpus=2)


def kill(here, gpu: int, status: int = 700) -> None:
    here.dead[gpu] = surface.CUDARuntimeError(ILLEGAL, status)


USES = {
    "download": lambda device, buffer: buffer.numpy(),
    "upload": lambda device, buffer: device.upload(data((SIZE,))),
    "zeros": lambda device, buffer: device.zeros((SIZE,), FLOAT),
    "copy": lambda device, buffer: device.copy(device.empty((SIZE,), FLOAT), buffer),
    "launch": lambda device, buffer: gr.add_n([buffer, buffer]),
    "mark": lambda device, buffer: device.mark(),
    "synchronize": lambda device, buffer: device.synchronize(),
    "release": lambda device, buffer: device.release(buffer, cupy.cuda.get_current_stream(1).ptr),
}


@pytest.mark.parametrize("use", USES)
def test_the_call_that_meets_it_and_every_later_one_say_so(here, use):
    mesh = open_mesh([0, 1, 1], backend="cuda")
    device = mesh.devices[1]
    buffer = uploaded(device, 1)
    gr.add_n([buffer, buffer])
    device.synchronize()
    kill(here, 1)
    with pytest.raises(BackendUnavailableError, match=f"device cuda:1 was lost: {ILLEGAL}") as got:
        USES[use](device, buffer)
    assert isinstance(got.value.__cause__, surface.CUDARuntimeError)
    here.dead.clear()  # CUDA itself would go on answering so; we do not ask it again
    with pytest.raises(BackendUnavailableError, match="device cuda:2 was lost"):
        mesh.devices[2].empty((SIZE,), FLOAT)
    assert same(uploaded(mesh.devices[0], 3).numpy(), data((SIZE,), seed=3))
    kill(here, 1)
    mesh.close()  # which waits for nobody who is dead
    here.dead.clear()


def test_an_error_that_a_gpu_survives_loses_nothing(here):
    out_of_memory = 2
    assert out_of_memory not in FATAL
    with open_mesh([0, 1], backend="cuda") as mesh:
        kill(here, 1, out_of_memory)
        with pytest.raises(surface.CUDARuntimeError):
            mesh.devices[1].zeros((SIZE,), FLOAT)
        here.dead.clear()
        assert same(mesh.devices[1].zeros((2,), FLOAT).numpy(), np.zeros(2, np.float32))
