"""Captured steps and the rules of a capture, on the simulation, where a graph is a list."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from reduce.test_prepared import arrays_of, calls_of, live_bytes, pairs_of, refill, values_of
from support.exact_data import same
from support.meshes import PLACEMENTS, MeshCase, refused
from support.reduction_calls import dense

import gradreduce as gr
from gradreduce import ops as arithmetic
from gradreduce.device import Capture, deadline_scope, fork_streams, join_streams
from gradreduce.errors import CaptureError, CollectiveError
from gradreduce.reduce.prepared import CapturedStep

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SETTINGS = {"three packs": 3, "no packs": 0}


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("num_packs", SETTINGS.values(), ids=SETTINGS)
def test_each_call_is_a_batch_reduce_of_what_the_arrays_hold(placement, num_packs):
    with MeshCase(placement).open() as mesh:
        ops = gr.HierarchicalCopyAllReduce(num_packs)
        values = values_of(mesh)
        pairs = pairs_of(mesh, values)
        step = ops.capture(MEAN, pairs)
        assert isinstance(step, CapturedStep)
        kept = [buffer.address for result in step.results for buffer in result.buffers]
        live = live_bytes(mesh)
        for seed in (100, 200):
            refill(values, seed)
            with mesh.journal() as captured:
                found = step()
            with mesh.journal() as journal:
                ops.prepare(MEAN, pairs)()
            assert found is step.results
            assert all(map(same, arrays_of(found), arrays_of(ops.batch_reduce(MEAN, pairs))))
            done = [record for record in captured.records if record.kind != "fill"]
            assert done == journal.records[-len(done) :]  # as a prepared step's
            assert live_bytes(mesh) == live
        assert [buffer.address for result in step.results for buffer in result.buffers] == kept


def test_over_one_physical_device_nccl_too():
    with MeshCase((0, 0, 0)).open() as mesh:
        values = values_of(mesh)
        ops = gr.NcclAllReduce(mesh=mesh)
        step = ops.capture(SUM, [(value, value) for value in values])
        refill(values, 7)
        wanted = arrays_of(ops.batch_reduce(SUM, [(value, value) for value in values]))
        assert all(map(same, arrays_of(step()), wanted))


def played(seed, placement, capture):
    """Calls without a host wait between them: each one's results are kept on the devices."""
    with gr.open_mesh(placement, backend="sim", strict=True, schedule_seed=seed) as mesh:
        values = [dense(mesh, (6, 5), "float32", place) for place in range(2)]
        ops = gr.HierarchicalCopyAllReduce(0)
        pairs = [(values[0], values[0]), (values[1], mesh.devices[0])]
        step = ops.capture(SUM, pairs) if capture else ops.prepare(SUM, pairs)
        kept = []
        for turn in range(4):
            refill(values, 60 * turn)
            for result in step():
                for buffer in result.buffers:
                    near = buffer.device.empty(buffer.shape, buffer.dtype)
                    queue = "transfer" if turn % 2 else "compute"
                    buffer.device.copy(near, buffer, queue=queue)
                    kept.append(near)
        mesh.synchronize()
        return [near.numpy().tobytes() for near in kept]


@pytest.mark.parametrize("placement", [[0], [0, 1, 2], [0, 0, 1, 1]], ids=str)
def test_every_legal_order_has_the_same_bits(placement):
    expected = played(None, placement, capture=False)
    for seed in (None, *range(24)):
        assert played(seed, placement, capture=True) == expected, seed


def test_a_call_costs_the_host_the_same_whatever_is_in_it():
    def counted(num_tensors):
        with gr.open_mesh([0, 1], backend="sim", schedule_seed=0) as mesh:
            values = [dense(mesh, (5,), "float32", place) for place in range(num_tensors)]
            ops = gr.HierarchicalCopyAllReduce()
            step = ops.capture(SUM, [(value, value) for value in values])
            step()
            return calls_of(step)

    assert counted(2) == counted(60)


# -- the rules -------------------------------------------------------------------------------------


@pytest.fixture(params=[None, 0, 3], ids=str)
def mesh(request):
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True, schedule_seed=request.param) as opened:
        yield opened


def holding(device, number):
    return device.upload(np.full(6, number, np.float32))


@pytest.mark.parametrize("where", ["leaves", "is caught"])
def test_what_is_refused_inside(mesh, where):
    first, second, _ = mesh.devices
    source, target = holding(first, 1), holding(second, 2)
    calls = {
        "empty": lambda: first.empty((3,), "float32"),
        "zeros": lambda: first.zeros((3,), "float32"),
        "upload": lambda: first.upload(np.ones(6, np.float32), out=source),
        "download": lambda: first.download(source),
        "numpy": source.numpy,
        "release": lambda: first.release(source),
        "synchronize": mesh.synchronize,
        "trim": mesh.trim,
        "flight_record": mesh.flight_record,
        "close": mesh.close,
        "deadline": deadline_scope("a call", 60.0, [first]).__enter__,
        "capture": lambda: Capture([first]),
        "sum": lambda: gr.add_n([source, source]),
    }
    step = gr.HierarchicalCopyAllReduce().prepare(SUM, [(source, first)])
    calls["prepared step"] = step
    for refuse in calls.values():
        capture = Capture(mesh.devices)
        with mesh.journal() as journal:
            if where == "leaves":
                with pytest.raises(CaptureError), capture.recorded():
                    second.copy(target, source)
                    refuse()
                with pytest.raises(CaptureError, match="has not ended or has failed"):
                    capture()
            else:
                with capture.recorded():
                    second.copy(target, source)
                    with pytest.raises(CaptureError):
                        refuse()
        assert journal.records == []
        assert (target.numpy() == 2).all()
        if where == "is caught":
            capture()
            assert (target.numpy() == 1).all()
            second.upload(np.full(6, 2, np.float32), out=target)
    mesh.synchronize()


def test_a_device_that_is_not_named_is_refused(mesh):
    first, second, third = mesh.devices
    source, target = holding(first, 1), holding(third, 2)
    for refuse in (
        lambda: third.copy(target, source),
        third.mark,
        lambda: third.put(np.ones(3)),
        lambda: join_streams(first, [first, third]),
        lambda: fork_streams(first, [first, third]),
    ):
        with (
            refused(mesh, CaptureError, "sim:2 is not among the devices of the capture"),
            Capture([first, second]).recorded(),
        ):
            refuse()
    assert (target.numpy() == 2).all()


def test_another_mesh_is_refused_and_works_on(mesh):
    first, second, _ = mesh.devices
    source, target = holding(first, 1), holding(second, 2)
    with gr.open_mesh(2, backend="sim", strict=True) as other:
        near, far = holding(other.devices[0], 3), holding(other.devices[1], 4)
        calls = {
            "empty": lambda: other.devices[0].empty((3,), "float32"),
            "copy": lambda: other.devices[1].copy(far, near),
            "launch": lambda: arithmetic.add_n([near], [[near, near]]),
            "mark": other.devices[0].mark,
            "synchronize": other.synchronize,
            "trim": other.trim,
            "flight_record": other.flight_record,
            "reset": other.reset,
            "close": other.close,
            "open_mesh": lambda: gr.open_mesh(1, backend="sim"),
        }
        capture = Capture(mesh.devices)
        with other.journal() as journal, capture.recorded():
            second.copy(target, source)
            for refuse in calls.values():
                with pytest.raises(CaptureError, match="inside a capture"):
                    refuse()
        assert journal.records == []
        capture()
        assert [float(each.numpy()[0]) for each in (target, near, far)] == [1, 3, 4]


class Cycle:
    """Garbage that says when it is collected."""

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
    with pytest.raises(CaptureError), Capture(mesh.devices).recorded():
        Cycle(found)
        assert [[] for _ in range(1000)]
        assert found == []
        mesh.synchronize()
    assert gc.isenabled() == enabled


def test_nor_before_the_last_of_several_threads_is_outside(mesh, eager_collection):
    found, inside, leave = [], threading.Event(), threading.Event()

    def work():
        with Capture(mesh.devices).recorded():
            inside.set()
            assert leave.wait(30)
            found.append(gc.isenabled())

    thread = threading.Thread(target=work)
    with Capture(mesh.devices).recorded():
        thread.start()
        assert inside.wait(30)
    leave.set()
    thread.join(30)
    assert found == [False]
    assert gc.isenabled()


@pytest.mark.host
def test_what_must_be_compiled_is_refused():
    from gradreduce.backends.sim import host_compile

    with gr.open_mesh(1, backend="sim", kernels="compiled") as mesh:
        terms = [holding(mesh.devices[0], number) for number in (1, 2, 3)]
        kernel = next(each for each in arithmetic.KERNELS if each.name == "add_n")
        arithmetic.add_n([terms[0]], [terms[1:]])
        host_compile._loaded.discard((kernel, "fast"))
        with (
            refused(mesh, CaptureError, "compiling add_n is not allowed inside a capture"),
            Capture(mesh.devices).recorded(),
        ):
            arithmetic.add_n([terms[0]], [terms[1:]])
        host_compile._loaded.add((kernel, "fast"))
        assert (terms[0].numpy() == 5).all()
        capture = Capture(mesh.devices)
        with capture.recorded():
            arithmetic.add_n([terms[0]], [terms])
        assert (terms[0].numpy() == 5).all()
        for wanted in (10, 15):
            capture()
            assert (terms[0].numpy() == wanted).all()


def test_collectives_over_several_physical_devices_are_refused(mesh):
    value = dense(mesh, (6,), "float32", 0)
    with refused(mesh, CollectiveError, r"value 1: .*NVIDIA warns"):
        pairs = [(value, mesh.devices[0]), (value, value)]
        gr.NcclAllReduce(mesh=mesh).capture(SUM, pairs)
    with (
        refused(mesh, CollectiveError, "NVIDIA warns"),
        Capture(mesh.devices).recorded(),
    ):
        mesh.collective.all_reduce([value.buffers[0], value.buffers[2]])
    assert gr.NcclAllReduce(mesh=mesh).capture(SUM, [(value, mesh.devices[0])])()


def test_physical_devices_that_are_no_peers_are_refused():
    with gr.open_mesh([0, 1], backend="sim", peer_access=False) as mesh:
        value = dense(mesh, (6,), "float32", 0)
        with refused(mesh, CaptureError, "physical devices 0 and 1 have no peer access"):
            gr.HierarchicalCopyAllReduce().capture(SUM, [(value, value)])


def test_marks_from_before_are_waited_for_by_the_call_and_marks_from_inside_nowhere():
    for seed in range(20):
        with gr.open_mesh([0, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
            first, second = mesh.devices
            source, near, target = holding(first, 1), holding(first, 2), holding(second, 3)
            first.copy(near, source, queue="transfer")
            earlier = first.mark("transfer")
            capture = Capture(mesh.devices)
            with capture.recorded():
                second.wait(earlier)
                second.copy(target, near)
                inside = second.mark()
                first.wait(inside)
            with pytest.raises(CaptureError, match="made inside a capture of sim:1"):
                first.wait(inside)
            capture()
            assert (target.numpy() == 1).all(), seed


def test_a_call_stands_behind_its_devices_and_before_them():
    for seed in range(30):
        with gr.open_mesh([0, 1, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
            first, second, third = mesh.devices
            source, target, far = holding(first, 0), holding(second, 0), holding(third, 0)
            capture = Capture([third, first, second])
            with capture.recorded():
                second.copy(target, source, queue="transfer")
                third.wait(second.mark("transfer"))
                third.copy(far, target)
            kept = []
            for turn in range(1, 4):
                first.upload(np.full(6, turn, np.float32), out=source)
                capture()
                near = second.empty((6,), "float32")
                second.copy(near, target)
                kept.append(near)
                first.copy(holding(first, 0), far)
            assert [float(near.numpy()[0]) for near in kept] == [1, 2, 3], seed


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_writer_waits_for_readers(when):
    for seed in range(40):
        with gr.open_mesh([0, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
            first, second = mesh.devices
            source, other, kept = (
                holding(first, 1),
                holding(first, 2),
                second.empty((6,), "float32"),
            )
            capture = Capture(mesh.devices)
            if when == "before":
                second.copy(kept, source, queue="transfer")
            with capture.recorded():
                if when == "inside":
                    second.copy(kept, source, queue="transfer")
                arithmetic.add_n([source], [[other, other]])
            if when == "after":
                second.copy(kept, source, queue="transfer")
            capture()
            mesh.synchronize()
            assert (kept.numpy() == 1).all(), seed
            assert (source.numpy() == 4).all(), seed


def test_what_it_uses_stays_alive_and_ends_with_it(mesh):
    first = mesh.devices[0]
    gc.collect()
    before = live_bytes(mesh)
    source, target = holding(first, 5), holding(first, 0)
    capture = Capture([first])
    with capture.recorded():
        first.copy(target, source)
    del source
    gc.collect()
    others = [holding(first, 9) for _ in range(4)]
    capture()
    assert (target.numpy() == 5).all()
    del capture, target, others
    gc.collect()
    mesh.synchronize()
    assert live_bytes(mesh) == before


def test_memory_freed_meanwhile_returns_to_its_pool_afterwards(mesh):
    first, second, _ = mesh.devices
    before = live_bytes(mesh)
    source, target = holding(first, 5), holding(second, 0)
    second.copy(target, source)
    with Capture(mesh.devices).recorded():
        del source, target
        gc.collect()
        first.drain()
    mesh.synchronize()
    assert live_bytes(mesh) == before


def test_small_sums_of_host_arrays_are_no_way_around_it():
    with gr.open_mesh(1, backend="sim", strict=False) as mesh:
        arrays = [np.ones(3, np.float32), np.ones(3, np.float32)]
        with refused(mesh, CaptureError, "empty"), Capture(mesh.devices).recorded():
            assert arithmetic.add_on_host(arrays, lambda: mesh.devices[0]) is None
            mesh.devices[0].empty((3,), "float32")


def test_other_threads_use_the_devices_meanwhile(mesh):
    first, second, _ = mesh.devices
    source, target = holding(first, 1), holding(second, 2)
    found = []

    def work():
        near = holding(second, 0)
        second.copy(near, source)
        first.upload(np.full(6, 7, np.float32), out=source)
        value = gr.PerReplica([holding(device, 1) for device in mesh])
        found.append(near.numpy())
        found.append(gr.HierarchicalCopyAllReduce().reduce(SUM, value, value).buffers[1].numpy())

    capture = Capture(mesh.devices)
    with capture.recorded():
        second.copy(target, source)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    assert [float(array[0]) for array in found] == [1, 3]
    assert (target.numpy() == 2).all()
    capture()
    assert (target.numpy() == 7).all()


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


def test_arrays_of_other_libraries_are_captured_too():
    with MeshCase((0, 1)).open() as mesh:
        arrays = [np.ones(5, np.float32), np.ones(5, np.float32)]
        value = gr.PerReplica(arrays, mesh)
        step = gr.HierarchicalCopyAllReduce().capture(SUM, [(value, value)])
        arrays[1][...] = 4
        assert same(step()[0].values[1], np.full(5, 5, np.float32))
