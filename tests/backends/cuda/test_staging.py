"""Uploads and downloads through pinned memory, of which CuPy's pool gives nothing back."""

from collections.abc import Iterator

import numpy as np
import pytest
from device.contract import data
from fake_cupy.machine import Machine
from fake_cupy.memory import PINNED, rounded
from support.hanging_devices import TEST_TIMEOUT

import gradreduce as gr
from gradreduce.backends.cuda import device as cuda
from gradreduce.backends.cuda import staging
from gradreduce.device import Mesh
from gradreduce.device.run.inexact import queue_download
from gradreduce.errors import CollectiveError

pytestmark = pytest.mark.fake_cupy
CHUNK = 4096
MOST = 4 * rounded(CHUNK, PINNED)


@pytest.fixture(params=range(4))
def here(request, gpus, monkeypatch) -> Machine:
    monkeypatch.setattr(staging, "CHUNK", CHUNK)
    monkeypatch.setattr(cuda, "CHUNK", CHUNK)
    monkeypatch.setattr(cuda, "SMALL", 1024)
    monkeypatch.setattr(staging, "IN_FLIGHT", 3 * CHUNK)
    return gpus(request.param, num_gpus=1, pinned=2 * MOST)


@pytest.fixture
def mesh(here) -> Iterator[Mesh]:
    with gr.open_mesh([0, 0], backend="cuda") as made:
        yield made


@pytest.mark.parametrize("of", ["contiguous", "strided"])
def test_a_large_array_uses_little_pinned_memory(here, mesh, of):
    """Also several, of two devices of one GPU; each may be changed as soon as upload returns."""
    made = []
    for seed in range(5):
        values = data((103, 131), seed=seed)
        array = values.copy()
        if of == "strided":
            array = np.repeat(values, 2, axis=1)[:, ::2]
        device = mesh.devices[seed % 2]
        made.append((values, device.upload(array)))
        array[...] = 0
    assert here.heap.used(PINNED) <= MOST
    for values, buffer in made:
        assert (buffer.numpy(deadline=TEST_TIMEOUT) == values).all()
        assert (buffer.numpy() == values).all()  # polls after the first deadline
    assert here.heap.used(PINNED) <= MOST


def test_only_large_uploads_wait(here, mesh):
    device = mesh.devices[0]
    device.synchronize(deadline=TEST_TIMEOUT)  # later waits poll
    here.stall(device)
    device.upload(data((5 * CHUNK // 8,)))
    small = [device.upload(data((100,), seed=seed)) for seed in range(9)]
    late = gr.device.deadline_scope("a call", 0.05, mesh.devices)
    with pytest.raises(CollectiveError, match=r"the deadline .*passed"), late:
        device.upload(data((2 * CHUNK,)))
    here.resume()
    mesh.reset(timeout=TEST_TIMEOUT)
    for seed, buffer in enumerate(small):
        assert (buffer.numpy() == data((100,), seed=seed)).all()


def test_a_download_that_passes_no_deadline_uses_no_pinned_memory(here, mesh):
    device = mesh.devices[0]
    buffer = device.upload(data((5 * CHUNK,)))
    device.synchronize()
    here.stall(device)
    device.zeros((4,), "float32")
    with pytest.raises(CollectiveError, match="passed"):
        buffer.numpy(deadline=0.05)
    here.resume()
    mesh.reset(timeout=TEST_TIMEOUT)
    assert not len(device._staging)
    assert (buffer.numpy() == data((5 * CHUNK,))).all()


def test_a_queued_download_is_none_until_the_queue_has_passed_it(here, mesh):
    """Its pinned memory is kept until then, although nobody may read it."""
    device = mesh.devices[0]
    device.synchronize(deadline=TEST_TIMEOUT)  # later waits poll
    here.stall(device)
    read, dropped = [queue_download(device.upload(data((9,), seed=seed))) for seed in (1, 2)]
    del dropped
    assert read() is None
    held = device.upload(data((9,), seed=3))  # overwrites pinned memory that is not kept
    here.resume()
    device.synchronize()
    assert (read() == data((9,), seed=1)).all()
    assert (held.numpy() == data((9,), seed=3)).all()
    del read
    device.synchronize()
    assert not len(device._staging)


def test_a_lack_of_pinned_memory_is_a_lack_of_host_memory(gpus):
    gpus(2, num_gpus=1, pinned=10_000)
    with gr.open_mesh(1, backend="cuda") as mesh:
        device = mesh.devices[0]
        says = "cuda:0: the host cannot pin 40,000 bytes of its memory for a copy: free host memory"
        with pytest.raises(MemoryError, match=says):
            device.upload(data((10_000,)))
        for seed in range(3):  # CuPy's pool frees other sizes first
            array = data((100 * 4**seed,), seed=seed)
            assert (device.upload(array).numpy() == array).all()
