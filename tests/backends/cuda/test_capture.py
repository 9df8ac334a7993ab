"""Captured steps as CUDA graphs, whose launch costs one call."""

import gc
from functools import partial

import numpy as np
import pytest
from support.captures import captured
from support.exact_data import same
from support.reduction_calls import dense
from support.threads import in_threads

import gradreduce as gr
from gradreduce import ops

SUM = gr.ReduceOp.SUM


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
            return near.numpy()

        copy = partial(mesh.devices[1].copy, target, source)
        step = captured(mesh.devices, copy, lambda: found.extend(in_threads(work)))
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
            reducer = gr.HierarchicalCopyAllReduce(num_packs=min(num_tensors, 3), mesh=mesh)
            step = reducer.capture(SUM, [(value, value) for value in values])
            step()
            return machine.counted(lambda: [step(), step()])

        few, many = counted(1), counted(40)
        assert few == many
        assert few["graph_launch"] == 2
        # On one GPU no queue is marked: the others have no work since the last call.
        fences = {"record", "wait"} if len(set(placement)) > 1 else set()
        assert few.keys() == {"graph_launch", *fences}


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("seed", range(4))
def test_copies_and_launches_between_gpus_are_captured(seed, gpus):
    """What a graph writes waits for earlier work on all of its GPUs, and later work for it."""
    gpus(seed)
    with gr.open_mesh([0, 1], backend="cuda") as mesh:
        near, far = mesh.devices
        source, copied = near.upload(np.ones(400)), far.zeros((400,), "float64")
        total = near.zeros((400,), "float64")

        def work():
            far.copy(copied, source)
            ops.accumulate_n([total], [[source]], device=near)

        step = captured(mesh.devices, work)
        for turn in range(1, 4):
            far.upload(np.zeros(400), out=copied)
            near.upload(np.full(400, float(turn)), out=source)
            step.submit()
            near.fill_zero(source)
            assert same(copied.numpy(), np.full(400, float(turn)))
        assert same(total.numpy(), np.full(400, 1.0 + 1 + 2 + 3))
