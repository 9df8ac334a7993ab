"""Captured steps as CUDA graphs: the simulation's bits, and a launch that costs one call."""

from __future__ import annotations

import gc
import threading
from functools import partial

import numpy as np
import pytest
from backends.cuda.test_prepared import MANY, PLACEMENTS, SHAPES
from support.captures import captured
from support.exact_data import random_data, same
from support.reduction_calls import dense

import gradreduce as gr
from gradreduce.errors import CaptureError, CollectiveError

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


def replayed(mesh, shapes, num_packs=2):
    """The results of three calls with other numbers each, also without a wait between them."""
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs, mesh=mesh)
    values = [dense(mesh, shape, dtype, place) for place, (shape, dtype) in enumerate(shapes)]
    targets = [*values[:-1], [mesh.devices[-1]]]
    step = ops.capture(MEAN, list(zip(values, targets, strict=True)))
    arrays = []
    for turn in range(3):
        for place, value in enumerate(values):
            for buffer in value.buffers:
                numbers = random_data(buffer.shape, buffer.dtype, seed=turn * 50 + place)
                buffer.device.upload(numbers, out=buffer)
        step()
        with mesh.journal() as journal:
            step()
        assert (journal.uploads, journal.syncs) == (0, 0)
        assert journal.launches > 0
        arrays += [buffer.numpy() for result in step.results for buffer in result.buffers]
    return arrays


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("shapes", [SHAPES, MANY], ids=["few", "many"])
def test_steps_are_those_of_the_simulation(placement, shapes, gpus):
    gpus(len(placement))
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        found, wanted = replayed(mesh, shapes), replayed(sim, shapes)
    assert len(found) == len(wanted)
    assert all(map(same, found, wanted))


@pytest.mark.gpu
def test_other_threads_use_the_devices_during_a_capture(gpus):
    gpus(1)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        source, target = mesh.devices[0].upload(np.ones(5)), mesh.devices[1].zeros((5,), "float64")
        found = []

        def work():
            near = mesh.devices[1].zeros((5,), "float64")
            mesh.devices[1].copy(near, source)
            mesh.synchronize()
            found.append(near.numpy())

        def meanwhile():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)

        copy = partial(mesh.devices[1].copy, target, source)
        step = captured(mesh.devices, copy, meanwhile)
        assert same(found[0], np.ones(5))
        mesh.devices[0].upload(np.full(5, 2.0), out=source)
        assert same(target.numpy(), np.ones(5))
        step.submit()
        assert same(target.numpy(), np.full(5, 2.0))


@pytest.fixture
def late_collection():
    """No garbage is collected until the test lowers the threshold."""
    threshold = gc.get_threshold()
    gc.set_threshold(1 << 30)
    yield
    gc.set_threshold(*threshold)


@pytest.mark.gpu
def test_a_mesh_that_fails_during_a_capture_does_not_invalidate_it(gpus, late_collection):
    """Closing it waits for queues and frees memory, which CUDA forbids during a capture."""
    gpus(0)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        source, target = mesh.devices[0].upload(np.ones(5)), mesh.devices[1].zeros((5,), "float64")
        gr.open_mesh([0], backend="cuda").devices[0].upload(np.ones(5))  # garbage from here on

        def meanwhile():
            gc.set_threshold(1)
            assert [[] for _ in range(1000)]

        captured(mesh.devices, partial(mesh.devices[1].copy, target, source), meanwhile).submit()
        assert same(target.numpy(), np.ones(5))


@pytest.mark.fake_cupy
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 1, 2, 0]], ids=str)
def test_a_call_is_one_graph_whatever_is_in_it(placement, seed, gpus):
    machine = gpus(seed)
    with gr.open_mesh(placement, backend="cuda") as mesh:

        def counted(num_tensors):
            values = [dense(mesh, (6,), "float32", place) for place in range(num_tensors)]
            ops = gr.HierarchicalCopyAllReduce(num_packs=min(num_tensors, 3), mesh=mesh)
            step = ops.capture(SUM, [(value, value) for value in values])
            step()
            before = dict(machine.counts)
            step()
            step()
            return {
                what: machine.counts[what] - before.get(what, 0)
                for what in machine.counts
                if machine.counts[what] != before.get(what, 0)
            }

        few, many = counted(1), counted(40)
        assert few == many
        assert few["graph_launch"] == 2
        # On one GPU no queue is marked: the others have no work since the last call.
        fences = {"record", "wait"} if len(set(placement)) > 1 else set()
        assert few.keys() == {"graph_launch", *fences}


@pytest.mark.fake_cupy
def test_nccl_over_several_gpus_is_refused(gpus):
    gpus(1)
    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        value = dense(mesh, (6,), "float32", 0)
        with pytest.raises(CollectiveError, match=r"value 0: .*NVIDIA warns"):
            gr.NcclAllReduce(mesh=mesh).capture(SUM, [(value, value)])
        one = gr.NcclAllReduce(mesh=mesh).capture(SUM, [(value, mesh.devices[0])])
        assert one()[0].buffers[0].shape == (6,)


@pytest.mark.fake_cupy
def test_gpus_without_peer_access_are_refused(gpus):
    gpus(1, peers=False)
    with gr.open_mesh([0, 1], backend="cuda") as mesh:
        value = dense(mesh, (6,), "float32", 0)
        with pytest.raises(CaptureError, match="0 and 1 have no peer access"):
            gr.HierarchicalCopyAllReduce(mesh=mesh).capture(SUM, [(value, value)])


def copied(device, buffer):
    near = device.empty(buffer.shape, buffer.dtype)
    device.copy(near, buffer)
    return near.numpy()


def overwritten(device, buffer):
    found = buffer.numpy()
    device.upload(np.full(buffer.shape, -1, np.float32), out=buffer, queue="transfer")
    return found


WAYS = {
    "download": lambda device, out: out.numpy(),
    "copy": copied,
    "release": lambda device, out: device.release(out, 0).get(),
    "upload": overwritten,
    "synchronize": lambda device, out: device.synchronize() or out.numpy(),
}


@pytest.mark.fake_cupy
@pytest.mark.parametrize("way", WAYS)
def test_later_work_waits_for_two_graphs_of_different_devices(way, gpus):
    gpus(0 if way in ("copy", "upload") else 2)
    with gr.open_mesh([0, 1, 2], backend="cuda") as mesh:
        first, second, third = mesh.devices
        source, out, other = (device.zeros((300,), "float32") for device in mesh)
        one = captured([first, second, third], partial(second.copy, out, source)).submit
        two = captured([third, second], partial(third.copy, other, out)).submit
        for turn in range(1, 4):
            first.upload(np.full(300, turn, np.float32), out=source)
            one()
            two()
            assert (WAYS[way](second, out) == turn).all()
        assert (other.numpy() == 3).all()
