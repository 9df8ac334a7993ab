"""Captures of callers contain none of our work; effects of other threads on our captures."""

import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import numpy as np
import pytest
from support.captures import captured
from support.exact_data import same
from support.threads import in_threads

import gradreduce as gr
from gradreduce import ops as arithmetic
from gradreduce.errors import CaptureError

SUM = gr.ReduceOp.SUM
FAKE = getattr(sys.modules.get("cupy"), "FAKE", False)
GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # CUDA's modes of a capture


@contextmanager
def captured_by_caller(stream, mode):
    """Captures inside; yields a list that gets the caller's graph."""
    found = []
    with stream:
        stream.begin_capture(mode)
        try:
            yield found
        finally:
            found.append(stream.end_capture())


def calls_with(stream, array, mesh):
    """Calls that wait for ``stream``, on which ``array`` was made."""
    first = mesh.devices[0]
    buffer = first.upload(np.ones(6, np.float32))
    others = [each.upload(np.ones(6, np.float32)) for each in mesh.devices[1:]]
    thirds = [each.view(0, (3,)) for each in others]
    value = gr.PerReplica([array, *others], mesh)
    pairs = [(value, value)]
    ours = gr.PerReplica([buffer, *others], mesh)
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    flat = mesh.flat_buffer([(6,)], "float32")
    flat.arrays("cupy")
    calls = {
        "put": lambda: first.put(array),
        "put in pieces": lambda: first.put(array[::2]),
        "adopt": lambda: first.adopt(array, stream.ptr),
        "release": lambda: first.release(buffer, stream),
        "PerReplica": lambda: gr.PerReplica([array, *others], mesh),
        "PerReplica in pieces": lambda: gr.PerReplica([array[::2], *thirds], mesh),
        "reduce": lambda: ops.reduce(SUM, value, value),
        "prepared": ops.prepare(SUM, pairs),
        "only taken": ops.prepare(SUM, [(ours, ours)], output_type="cupy"),
        "captured": ops.capture(SUM, pairs),
        "flat": flat.adopt,
    }
    for call in calls.values():  # compiles and allocates everything
        call()
    return calls


def refused(call) -> None:
    with pytest.raises(CaptureError, match="is capturing a CUDA graph"):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_callers_capture_contains_none_of_our_work(mode, gpus, cupy):
    gpus(mode)
    with gr.open_mesh([0, 0], backend="cuda") as mesh, cupy.cuda.Device(0):
        theirs = cupy.cuda.Stream(non_blocking=True)
        with theirs:
            array = cupy.asarray(np.ones(6, np.float32))
            array += 1
            calls = calls_with(theirs, array, mesh)
            array[...] = 0
        mesh.synchronize()
        theirs.synchronize()
        with captured_by_caller(theirs, mode) as found:
            array += 1
            array += 1
        (alone,) = found
        with captured_by_caller(theirs, mode) as found:
            array += 1
            for call in calls.values():
                refused(call)
            array += 1
        (graph,) = found
        if FAKE:
            assert len(graph._nodes) == len(alone._nodes)
        for turn in range(3):
            with theirs:
                assert (array.get() == 2 * turn).all()
            graph.launch(theirs)
        for call in calls.values():
            with theirs:
                call()
        mesh.synchronize()


@pytest.mark.fake_cupy
def test_a_refused_call_queries_each_stream_once_and_does_nothing_else(gpus, cupy):
    machine = gpus(0)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        theirs = cupy.cuda.Stream(non_blocking=True)
        with theirs:
            array = cupy.asarray(np.ones(6, np.float32))
            calls = calls_with(theirs, array, mesh)
        for begin in (False, True):
            if begin:
                theirs.begin_capture(GLOBAL)
            for name, call in calls.items():
                with theirs:
                    found = machine.counted(partial(refused, call) if begin else call)
                # Again for each device of a flat buffer, new results, and the stream of a copy.
                most = {"reduce": 3, "flat": 2}.get(name, 1 + name.endswith("in pieces"))
                assert 1 <= found.pop("is_capturing") <= most, name
                if begin:
                    assert not any(found.values()), (name, found)
        assert len(theirs.end_capture()._nodes) == 0


@pytest.mark.gpu
def test_memory_used_by_a_capturing_stream_waits_for_the_end_of_the_capture(gpus, cupy):
    gpus(0)
    with gr.open_mesh([0], backend="cuda") as mesh, cupy.cuda.Device(0):
        (device,) = mesh.devices
        theirs = cupy.cuda.Stream(non_blocking=True)
        with theirs:
            array = device.release(device.upload(np.ones(6, np.float32)), theirs)
            array += 1
        address = array.data.ptr
        mesh.synchronize()
        with captured_by_caller(theirs, RELAXED) as found:
            array += 1
            del array
            device.drain()
            kept = [device.empty((6,), "float32") for _ in range(2)]
            assert address not in [each.address for each in kept]
        assert len(found) == 1
        device.drain()
        theirs.synchronize()
        device.drain()
        assert not device._deferred_free.freed
        assert not device._deferred_free._deferred


@pytest.mark.gpu
def test_a_default_stream_that_waits_for_a_capture_is_refused(gpus, cupy):
    """CUDA refuses it, because a blocking stream of the caller is captured."""
    machine = gpus(1)
    with gr.open_mesh([0], backend="cuda") as mesh, cupy.cuda.Device(0):
        theirs = cupy.cuda.Stream(non_blocking=FAKE)
        if FAKE:
            machine.queues[0].blocking.append(machine.queues[theirs.ptr])
        array = cupy.asarray(np.ones(6, np.float32))
        array += 1
        cupy.cuda.Stream.null.synchronize()
        with captured_by_caller(theirs, THREAD_LOCAL) as found:
            array += 1
            with cupy.cuda.Stream.null, pytest.raises(CaptureError, match="default stream"):
                mesh.devices[0].put(array)
        found[0].launch(theirs)
        with theirs:
            assert (array.get() == 3).all()
        assert (mesh.devices[0].put(array).numpy() == 3).all()


@pytest.mark.gpu
def test_an_invalid_capture_is_refused_too_and_says_why(gpus, cupy):
    gpus(1)
    with gr.open_mesh([0], backend="cuda") as mesh, cupy.cuda.Device(0):
        (device,) = mesh.devices
        theirs = cupy.cuda.Stream(non_blocking=True)
        with theirs:
            array = cupy.asarray(np.ones(6, np.float32))
        theirs.synchronize()
        said = []
        with pytest.raises(RuntimeError), captured_by_caller(theirs, THREAD_LOCAL):
            for call in (lambda: device.empty((1 << 20,), "float32"), lambda: device.put(array)):
                with theirs, pytest.raises(CaptureError) as error:
                    call()
                said.append(str(error.value))
        assert len(said) == 2
        assert "capture_error_mode=" in said[0]
        assert "is capturing a CUDA graph" in said[1]
        assert (device.put(array).numpy() == 1).all()


@pytest.fixture
def torch(gpus, monkeypatch):
    """PyTorch, or its stand-in on the fake."""
    if not FAKE:
        import torch

        return torch
    gpus(1)
    from fake_cupy.foreign import stand_in

    monkeypatch.setitem(sys.modules, "torch", stand_in())
    return sys.modules["torch"]


def tensor_of(torch, array):
    if FAKE:
        with torch.on(0):
            return torch.Tensor(sys.modules["cupy"].asarray(array))
    return torch.from_numpy(array).to("cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if FAKE else pytest.mark.torch)
     for mode in ("global", "thread_local", "relaxed")],
)  # fmt: skip
def test_our_calls_inside_torch_cuda_graph(mode, torch):
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        tensors = [tensor_of(torch, np.full(6, k, np.float32)) for k in range(2)]
        for tensor in tensors:
            tensor.add_(1)
        value = gr.PerReplica(tensors, mesh)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        calls = [
            lambda: gr.PerReplica(tensors, mesh),
            lambda: ops.reduce(SUM, value, value),
            ops.prepare(SUM, [(value, value)]),
            ops.capture(SUM, [(value, value)]),
        ]
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            tensors[0].add_(1)
            for call in calls:
                refused(call)
            tensors[1].add_(1)
        graph.replay()
        (total,) = calls[-1]()
        if FAKE:
            with torch.on(0):
                assert (total.values[0].array.get() == 5).all()
        else:
            assert (total.values[0].cpu().numpy() == 5).all()


@pytest.mark.fake_cupy
def test_a_tensor_is_shared_while_cupys_stream_captures(torch, cupy):
    """Only PyTorch's stream is made to wait."""
    from fake_cupy.machine import current

    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        tensors = [tensor_of(torch, np.ones(6, np.float32)) for _ in range(2)]
        theirs = cupy.cuda.Stream(non_blocking=True)
        with captured_by_caller(theirs, GLOBAL):
            gr.PerReplica(tensors, mesh)
        counts = current().counts
        before = counts["is_capturing"]
        value = gr.PerReplica(tensors, mesh)
        assert counts["is_capturing"] - before == 1  # not once for each queue that waits
        assert (value.buffers[0].numpy() == 1).all()


def disturb(what, mesh):
    if what == "trim":
        mesh.devices[0].empty((1 << 18,), "float32")
        mesh.trim()
    elif what == "synchronize":
        sys.modules["cupy"].cuda.Device(0).synchronize()
    else:
        sys.modules["torch"].cuda.synchronize()


BY_TORCH = pytest.param("torch.cuda.synchronize", marks=() if FAKE else pytest.mark.torch)


def in_another_thread(call, *arguments):
    """Runs it in another thread and ignores CUDA's error."""

    def work():
        with sys.modules["cupy"].cuda.Device(0), suppress(RuntimeError):
            call(*arguments)

    in_threads(work)


@pytest.mark.gpu
@pytest.mark.whole_product
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("own", [True, False], ids=["own thread", "another thread"])
@pytest.mark.parametrize("what", ["allocate", "query"])
def test_the_same_calls_invalidate_a_capture_as_in_cuda(what, own, mode, gpus, cupy):
    """The rules of this file depend on it; a fake that differs from CUDA would hide faults."""
    gpus(1)
    kept = []
    with cupy.cuda.Device(0):
        theirs, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
        event.record()
        pool = cupy.cuda.MemoryPool()
        calls = {"allocate": lambda: kept.append(pool.malloc(1 << 20)), "query": lambda: event.done}
        forbidden = mode == GLOBAL or (mode == THREAD_LOCAL and own)
        invalid = pytest.raises(RuntimeError, match="Invalidated") if forbidden else nullcontext()
        with invalid, captured_by_caller(theirs, mode):
            if own:
                with suppress(RuntimeError):
                    calls[what]()
            else:
                in_another_thread(calls[what])


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["synchronize", "trim", BY_TORCH])
def test_a_host_wait_of_another_thread_leaves_a_correct_graph_or_none(what, gpus, request):
    if what.startswith("torch"):
        request.getfixturevalue("torch")
    else:
        gpus(1)
    with gr.open_mesh([0, 0], backend="cuda") as mesh, gr.open_mesh([0], backend="cuda") as other:
        first, second = mesh.devices
        source, target = first.upload(np.ones(6)), second.zeros((6,), "float64")
        near = first.zeros((6,), "float64")
        arithmetic.add_n([near], [[source, source]])  # compiled from here on

        def work():
            arithmetic.add_n([near], [[source, source]])
            arithmetic.add_n([near], [[near, source]])
            second.copy(target, near)

        try:
            capture = captured(mesh.devices, work, lambda: in_another_thread(disturb, what, other))
        except CaptureError as error:
            assert "synchronize" in str(error)
            capture = None
        if FAKE:  # it follows reports about CUDA (check_synchronize); not tried on a GPU
            assert (capture is None) == ("synchronize" in what)
        first.upload(np.full(6, 2.0), out=source)
        (capture or captured(mesh.devices, work)).submit()
        assert same(target.numpy(), np.full(6, 6.0))
        assert same(other.devices[0].upload(np.ones(3)).numpy(), np.ones(3))
