"""Captured steps and the rules of a capture, on the simulation, where a graph is a list."""

import gc
import threading
from functools import partial

import numpy as np
import pytest
from reduce.test_prepared import live_bytes
from support.captures import captured
from support.meshes import refused
from support.reduction_calls import dense

import gradreduce as gr
from gradreduce.errors import CaptureError, CollectiveError

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


# -- the rules -------------------------------------------------------------------------------------


@pytest.fixture(params=[None, 0, 3], ids=str)
def mesh(request):
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True, schedule_seed=request.param) as opened:
        yield opened


def holding(device, number):
    return device.upload(np.full(6, number, np.float32))


def at_once(mesh, meanwhile):
    """Captures nothing, and calls ``meanwhile`` during the capture, as on a GPU."""

    def run(devices, command_list):
        command_list.run()
        return command_list.run

    mesh.devices[0]._capture = run
    captured(mesh.devices, lambda: None, meanwhile)


class Cycle:
    """Garbage that records when it is collected."""

    def __init__(self, found):
        self.found, self.itself = found, self

    def __del__(self):
        self.found.append(gc.isenabled())


@pytest.fixture
def eager_collection():
    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*threshold)
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_inside(mesh, enabled, eager_collection):
    found = []
    if not enabled:
        gc.disable()

    def meanwhile():
        Cycle(found)
        assert [[] for _ in range(1000)]
        assert found == []
        raise KeyError

    with pytest.raises(KeyError):
        at_once(mesh, meanwhile)
    assert gc.isenabled() == enabled


def test_garbage_collection_resumes_after_the_last_of_several_threads(mesh, eager_collection):
    found, inside, leave = [], threading.Event(), threading.Event()

    def work():
        at_once(mesh, lambda: (inside.set(), leave.wait(30), found.append(gc.isenabled())))

    thread = threading.Thread(target=work)
    at_once(mesh, lambda: (thread.start(), inside.wait(30)))
    leave.set()
    thread.join(30)
    assert found == [False]
    assert gc.isenabled()


def test_collectives_over_several_physical_devices_are_refused(mesh):
    value = dense(mesh, (6,), "float32", 0)
    with refused(mesh, CollectiveError, r"value 1: .*NVIDIA warns"):
        pairs = [(value, mesh.devices[0]), (value, value)]
        gr.NcclAllReduce(mesh=mesh).capture(SUM, pairs)
    assert gr.NcclAllReduce(mesh=mesh).capture(SUM, [(value, mesh.devices[0])])()


def test_physical_devices_without_peer_access_are_refused():
    with gr.open_mesh([0, 1], backend="sim", peer_access=False) as mesh:
        value = dense(mesh, (6,), "float32", 0)
        with refused(mesh, CaptureError, "physical devices 0 and 1 have no peer access"):
            gr.HierarchicalCopyAllReduce().capture(SUM, [(value, value)])


def test_what_it_uses_stays_alive_and_ends_with_it(mesh):
    first = mesh.devices[0]
    gc.collect()
    before = live_bytes(mesh)
    source, target = holding(first, 5), holding(first, 0)
    capture = captured([first], partial(first.copy, target, source)).submit
    del source
    gc.collect()
    others = [holding(first, 9) for _ in range(4)]
    capture()
    assert (target.numpy() == 5).all()
    del capture, target, others
    gc.collect()
    mesh.synchronize()
    assert live_bytes(mesh) == before


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_a_call_has_a_deadline_and_one_line_in_the_flight_record(seed):
    with gr.open_mesh([0, 1], backend="sim", schedule_seed=seed) as mesh:
        value = dense(mesh, (40,), "float32", 1)
        step = gr.HierarchicalCopyAllReduce().capture(SUM, [(value, value)])
        before = mesh.flight_record()[-1].sequence
        with mesh.journal() as journal:
            assert len(step(deadline=60)[0].buffers) == 2
        entry = mesh.flight_record()[-1]
        assert (entry.sequence, entry.kind, entry.name) == (before + 1, "launch", "captured step")
        assert entry.num_rows == 1  # operations in it
        assert entry.nbytes == journal.bytes == 320
        assert entry.tensors == "pack 1 of 1 (tensor 0)"
        mesh.synchronize()
