"""Host waits with a deadline: they end, and name the device that is late."""

import numpy as np
import pytest
from support.hanging_devices import TEST_TIMEOUT, clock, late_waits, stall

import gradreduce as gr
from gradreduce.device import Mesh
from gradreduce.errors import CollectiveError
from gradreduce.reduce import profile

__all__ = ["clock", "late_waits"]
SUM = gr.ReduceOp.SUM

pytestmark = pytest.mark.usefixtures("late_waits")


def opened(seed: int, placement=(0, 1, 2, 3)) -> Mesh:
    return gr.open_mesh(list(placement), backend="sim", strict=True, schedule_seed=seed)


@pytest.fixture
def mesh():
    with opened(3, (0, 0, 1, 2)) as made:
        yield made


@pytest.mark.parametrize("how", ["profile", "zero", "release", "Variable.numpy"])
def test_host_waits_inside_a_call_end_at_the_deadline(mesh, how, monkeypatch):
    monkeypatch.setattr(profile, "HOST_BYTES", 1 << 20)  # of profile, which otherwise copies 64 MB
    flat = mesh.flat_buffer([(4,)], "float32")
    flat.arrays("numpy")
    variable = gr.Variable(np.zeros(4, np.float32), device=mesh[[2, 3]])
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    value = gr.PerReplica(list(flat.buffers), mesh)
    calls = {
        "profile": lambda deadline: ops.profile(SUM, [(value, value)], deadline=deadline),
        "zero": lambda deadline: flat.zero(deadline=deadline),
        "release": lambda deadline: flat.release(deadline=deadline),
        "Variable.numpy": lambda deadline: variable.numpy(deadline=deadline),
    }
    mesh.synchronize()
    stall(mesh.devices[2])
    with pytest.raises(CollectiveError, match=r"passed: sim:2 has not "):
        calls[how](5)
    mesh.reset(timeout=TEST_TIMEOUT)
    calls[how](TEST_TIMEOUT)


@pytest.mark.parametrize(
    "wait",
    [
        lambda mesh, buffer, deadline: buffer.numpy(deadline=deadline),
        lambda mesh, buffer, deadline: mesh.devices[2].download(buffer, deadline=deadline),
        lambda mesh, buffer, deadline: mesh.devices[2].synchronize(deadline=deadline),
        lambda mesh, buffer, deadline: mesh.synchronize(deadline=deadline),
    ],
)
def test_a_host_wait_ends_when_its_own_deadline_passes(mesh, wait):
    buffer = mesh.devices[2].zeros((4,), "float32")
    stall(mesh.devices[2])
    mesh.devices[2].copy(buffer, mesh.devices[2].upload(np.ones(4, np.float32)))
    words = r"passed: sim:2 has not finished its queues; the first .* is \w+, #\d+"
    with pytest.raises(CollectiveError, match=words):
        wait(mesh, buffer, 5)
    mesh.reset(timeout=TEST_TIMEOUT)
    wait(mesh, buffer, TEST_TIMEOUT)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("wait", ["_download", "_synchronize"])
def test_a_wait_that_an_abort_ends_raises(mesh, monkeypatch, wait, is_reset):
    """After an abort of a collective its queue continues, and the wait itself succeeds."""
    device = mesh.devices[0]
    buffer = device.zeros((4,), "float32")
    succeeds = getattr(device, wait)

    def aborted(*arguments):
        mesh.mesh_state.fail("aborted")
        if is_reset:
            mesh.reset(timeout=TEST_TIMEOUT)
        return succeeds(*arguments)

    monkeypatch.setattr(device, wait, aborted)
    with pytest.raises(CollectiveError):
        device.synchronize() if wait == "_synchronize" else buffer.numpy()


HOW = {
    "reduce": lambda ops, pairs: lambda: ops.batch_reduce(SUM, pairs),
    "prepare": lambda ops, pairs: ops.prepare(SUM, pairs),
    "capture": lambda ops, pairs: ops.capture(SUM, pairs),
}


@pytest.mark.parametrize(
    ("algorithm", "how"),
    [("nccl", "reduce"), ("nccl", "prepare"), *(("hierarchical_copy", how) for how in HOW)],
)
def test_a_host_wait_names_the_device_that_others_wait_for(algorithm, how):
    """The host waits for device 0, which waits for device 3, which hangs."""
    for seed in (0, 1):
        with opened(seed) as mesh:
            ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh)
            terms = [device.upload(np.ones(70, np.float32)) for device in mesh]
            value = gr.PerReplica(terms, mesh)
            step = HOW[how](ops, [(value, value)])
            mesh.synchronize()
            stall(mesh.devices[3])
            results = step()
            waits = (mesh.synchronize, results[0].buffers[0].numpy)
            words = r"passed: sim:3 has not finished its queues.* packs 1 to 2 of 2 "
            with pytest.raises(CollectiveError, match=words + r"\(tensor 0\), #\d+;"):
                waits[seed](deadline=5)


def test_all_devices_that_may_be_stuck_are_named(mesh):
    for device in mesh.devices[1:3]:
        device.zeros((4,), "float32")
        stall(device)
        device.zeros((4,), "float32")
    words = "sim:1, sim:2 have not finished their queues; the first .* fill on sim:1, #1"
    with pytest.raises(CollectiveError, match=words):
        mesh.synchronize(deadline=5)
