"""Which GPUs get a context, and which GPU is current afterwards.

The fake reports a context that our code makes on a GPU outside the meshes, in every test.
"""

import cupy
import numpy as np
import pytest
from support.hanging_devices import TEST_TIMEOUT, wait_for_failure
from support.reduction_calls import dense
from support.thread_group import run_processes
from support.threads import in_threads

import gradreduce as gr
from gradreduce.backends.cuda import libcuda
from gradreduce.device import deadline_scope

pytestmark = pytest.mark.fake_cupy

GRAD = np.arange(9, dtype=np.float32)


def summed(mesh: gr.Mesh, algorithm: str) -> np.ndarray:
    ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
    (row,) = ops.all_reduce([[GRAD]] * len(mesh), gr.ReduceOp.SUM, output_type="buffer")[:1]
    return row[0].numpy()


@pytest.mark.parametrize("algorithm", ["hierarchical_copy", "nccl"])
def test_a_mesh_makes_contexts_on_its_own_gpus_only(gpus, algorithm):
    """Neither do the threads that wait, make communicators, abort them and write records."""
    here = gpus(2, num_gpus=4)
    with gr.open_mesh([1, 2], backend="cuda") as mesh:
        assert (summed(mesh, algorithm) == 2 * GRAD).all()
        with deadline_scope("a call", TEST_TIMEOUT, mesh.devices):
            late = mesh.devices[1].upload(GRAD)
        mark = mesh.devices[0].queue_mark()
        assert (late.numpy(deadline=TEST_TIMEOUT) == GRAD).all()
        in_threads(lambda: mark.passed)  # of which the current GPU is 0
        mesh.flight_record()
        mesh.mesh_state.fail("for a test")
        wait_for_failure(mesh)
        mesh.reset(timeout=TEST_TIMEOUT)
        assert (summed(mesh, algorithm) == 2 * GRAD).all()
    assert here.contexts == {1, 2}


def test_the_mesh_of_a_process_makes_a_context_on_its_gpu_only(gpus):
    """Each thread of this test is a process, whose current GPU is 0 at first."""
    here = gpus(2, num_gpus=4)

    def work(group):
        with gr.open_mesh([group.rank + 1], backend="cuda", process_group=group) as mesh:
            return summed(mesh, "hierarchical_copy")

    for found in run_processes(2, work):
        assert (found == 2 * GRAD).all()
    assert here.contexts == {1, 2}


def test_a_call_returns_to_the_callers_gpu_if_that_has_a_context(gpus):
    here = gpus(2, num_gpus=3)
    with gr.open_mesh([1], backend="cuda") as mesh:
        mesh.devices[0].upload(GRAD)
        assert (here.contexts, cupy.cuda.runtime.getDevice()) == ({1}, 1)
        cupy.cuda.Device(2).use()
        mesh.devices[0].upload(GRAD)
        assert cupy.cuda.runtime.getDevice() == 2


def test_a_new_thread_sets_its_gpu_before_its_first_launch(gpus, monkeypatch):
    """Also if it is GPU 0, which is current anyway: a launch needs a context of the thread."""
    gpus(2, num_gpus=1)
    calls = []
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        value = gr.PerReplica([device.upload(GRAD) for device in mesh], mesh)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        step = ops.prepare(gr.ReduceOp.SUM, [(value, value)])
        for owner, name in ((cupy.cuda.runtime, "setDevice"), (cupy.cuda.Function, "__call__")):
            call = getattr(owner, name)

            def note(*arguments, call=call, name=name, **options):
                calls.append(name)
                return call(*arguments, **options)

            monkeypatch.setattr(owner, name, note)
        in_threads(step)
    assert calls.index("setDevice") < calls.index("__call__")


@pytest.mark.parametrize("form", ["prepare", "capture"])
def test_a_step_makes_its_gpu_the_current_one_once(gpus, monkeypatch, form):
    gpus(0)
    switched, switch = [], cupy.cuda.runtime.setDevice

    def counted(number):
        switched.extend([number] * (number != cupy.cuda.runtime.getDevice()))
        switch(number)

    cupy.cuda.Device(0).use()  # to which a call returns
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", counted)
    with gr.open_mesh([1, 1, 1], backend="cuda") as mesh:
        values = [dense(mesh, (7,), dtype, 0) for dtype in ("float32", "int16")]
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh)
        step = getattr(ops, form)(gr.ReduceOp.SUM, [(value, value) for value in values])
        step()
        with mesh.journal() as journal:
            switched.clear()
            step()
        assert switched == [1, 0]
        assert journal.launches > 1


def test_gpus_are_named_by_their_uuid(gpus, monkeypatch):
    """Two hosts may have the same name, and containers of one host have different names."""
    gpus(num_gpus=2)
    with gr.open_mesh(2, backend="cuda") as mesh:
        assert [device._hardware_name() for device in mesh] == [
            "GPU-ab000000-0000-0000-0000-000000000000",
            "GPU-ab000000-0000-0000-0000-000000000001",
        ]
        monkeypatch.setattr(libcuda, "_library", lambda: None)
        assert mesh.devices[1]._hardware_name().endswith(" 0000:01:00.0")
