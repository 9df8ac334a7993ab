"""A caller that passes an array or drops a result needs only the order of its own stream.

The caller's streams are PyTorch's, one on each GPU; nobody synchronises. The clocks of the machine
find what is not ordered, whatever the seed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from weakref import ref

import cupy
import numpy as np
import pytest
from device.contract import data
from fake_cupy import foreign
from fake_cupy.caller_tensors import (
    CASES,
    SHAPE,
    SUM,
    check_overwritten,
    dropped,
    ended,
    on,
    overwrite,
)
from fake_cupy.foreign import Tensor
from support.exact_data import same
from support.threads import in_threads

import gradreduce as gr
from gradreduce import ops
from gradreduce.arrays import replica_context
from gradreduce.arrays.caller_streams import StreamScope, release_inputs
from gradreduce.arrays.convert import from_buffer, to_buffer
from gradreduce.backends import open_mesh
from gradreduce.device import Device, Mesh
from gradreduce.reduce import prepared

pytestmark = pytest.mark.fake_cupy
torch = foreign.torch


@pytest.fixture
def mesh(here, monkeypatch) -> Iterator[Mesh]:
    with open_mesh([0, 0, 1], backend="cuda") as made:
        monkeypatch.setattr(replica_context, "default_mesh", lambda: made)
        yield made


@pytest.mark.whole_product  # some planted faults are found in one order only
@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
def test_inputs_may_be_overwritten_after_the_call(mesh, torch, call):
    check_overwritten(torch, mesh, call)


def test_arrays_wrapped_earlier_are_read_at_the_time_of_the_call(mesh, torch):
    tensors = [on(torch, each.physical, data(SHAPE)) for each in mesh]
    value = gr.PerReplica(tensors, mesh)
    overwrite(torch, tensors)
    made = gr.HierarchicalCopyAllReduce().reduce(SUM, value, value)
    assert same(made.buffers[2].numpy(), np.full(SHAPE, -3, "float32"))


def test_inputs_read_through_a_view_may_be_overwritten_after_the_call(mesh, torch):
    """Nothing else keeps it alive: an earlier call may have released it."""
    tensors = [on(torch, 0, data(SHAPE)) for _ in range(2)]
    values = [gr.PerReplica([tensor], devices=mesh.devices[:1]) for tensor in tensors]
    sums = []
    for value in values:
        gr.add_n(value.buffers, output_type="buffer")
        sums.append(gr.add_n([value.buffers[0].view(30, (30,))] * 2, output_type="buffer"))
    overwrite(torch, tensors[:1])
    del value, values, tensors
    for made in sums:
        assert same(made.numpy(), data(SHAPE)[1] * 2)


def test_copied_inputs_may_be_overwritten_at_once(mesh, torch):
    tensor = on(torch, 0, data(SHAPE))
    value = gr.PerReplica([Tensor(tensor.array[:, ::2])], devices=mesh.devices[:1])
    overwrite(torch, [tensor])
    assert same(value.buffers[0].numpy(), np.ascontiguousarray(data(SHAPE)[:, ::2]))


def records(here, call) -> int:
    return here.counted(call)["record"]


def test_a_callers_stream_is_waited_for_once_a_call(mesh, here, torch):
    tensors = [on(torch, 0, data(SHAPE)) for _ in range(6)]
    accs = [gr.ConditionalAccumulator("float32", device=mesh.devices[0]) for _ in tensors]
    gr.apply_grads(accs, tensors)
    counts = [records(here, lambda number=number: gr.apply_grads(accs[:number], tensors[:number]))
              for number in (1, 6)]  # fmt: skip
    assert counts == [2, 2]
    # If a result goes to the same stream, its release is that wait; otherwise there is one per GPU.
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh[:2])
    rows = [[tensors[0]], [tensors[1]]]
    ops.all_reduce(rows)
    given = [records(here, lambda kind=kind: ops.all_reduce(rows, output_type=kind))
             for kind in ("torch", "buffer")]  # fmt: skip
    assert given[0] >= given[1]
    # For an older value only the call that reads it waits.
    assert records(here, lambda: gr.PerReplica(rows[0], devices=mesh.devices[:1])) == 1


def test_a_call_that_raises_releases_its_inputs(mesh, here, torch):
    tensor = on(torch, 0, data(SHAPE))
    acc = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
    acc.apply_grad([1.0, 2.0, 3.0])

    def refused():
        with pytest.raises(ValueError, match="Shape mismatch"):
            acc.apply_grad(tensor)

    assert records(here, refused) == 2
    mesh.devices[0].mark_failed("for a test")
    with pytest.raises(gr.errors.BackendUnavailableError):
        acc.apply_grad(tensor)


def test_an_array_is_held_until_the_call_that_reads_it_is_over(mesh, torch):
    tensors = [on(torch, 0, data(SHAPE)) for _ in range(2)]
    held = [ref(tensor.array) for tensor in tensors]
    out, device = mesh.devices[0].zeros(SHAPE, "float32"), mesh.devices[0]
    with StreamScope():
        ops.add_n([out], [[to_buffer(tensors.pop(0), device), out]])
        assert held[0]() is not None
        release_inputs()  # inside a block that defers Ctrl-C
        assert held[0]() is None
        ops.add_n([out], [[to_buffer(tensors.pop(0), device), out]])
        assert held[1]() is not None
    assert held[1]() is None
    assert same(out.numpy(), data(SHAPE) * 2)


def test_the_waits_of_a_call_that_was_left_open_do_not_count(mesh, here):
    """Ctrl-C may prevent that a call closes its scope. The next call may open none."""
    device = mesh.devices[0]
    variable = gr.Variable(data(SHAPE), device=device)

    def read_new_value():
        device.fill_zero(variable.buffers[0])
        variable.array()

    expected = records(here, read_new_value)

    def left_open():
        StreamScope().__enter__()
        variable.array()

    left_open()
    assert records(here, read_new_value) == expected


@pytest.fixture
def unsynchronized(monkeypatch):
    """Inside, calls cannot make a caller's stream wait."""

    def refuse(device, stream):
        raise gr.errors.CollectiveError("for a test")

    @contextmanager
    def patched() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(Device, "block_stream", refuse)
            yield

    return patched


def test_an_array_is_kept_if_its_stream_cannot_wait(mesh, torch, unsynchronized):
    tensor = on(torch, 0, data(SHAPE))
    held = ref(tensor.array)
    with unsynchronized():
        made = gr.add_n([tensor, tensor], output_type="buffer")
    del tensor
    assert held() is not None
    assert same(made.numpy(), data(SHAPE) * 2)


def test_an_array_that_a_second_call_reads_is_held_again(mesh, torch, unsynchronized):
    tensors = [on(torch, each.physical, data(SHAPE)) for each in mesh]
    held, value = [ref(tensor.array) for tensor in tensors], gr.PerReplica(tensors, mesh)
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    ops.reduce(SUM, value, mesh, output_type="buffer")
    with unsynchronized():
        ops.reduce(SUM, value, mesh, output_type="buffer")
    del tensors, value
    assert all(array() is not None for array in held)


def test_arrays_of_a_prepared_step_that_failed_are_held(mesh, torch, monkeypatch):
    """Their streams were not made to wait."""

    def interrupt(self, results=()):
        raise KeyboardInterrupt

    tensors = [on(torch, each.physical, data(SHAPE)) for each in mesh]
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    step = ops.prepare(SUM, [(gr.PerReplica(tensors, mesh), mesh)], output_type="buffer")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepared.StreamBoundary, "leave", interrupt)
        step()
    held = [ref(tensor.array) for tensor in tensors]
    del tensors, step
    assert all(array() is not None for array in held)


def test_a_call_inside_the_callers_code_is_fenced_separately(mesh, here, torch):
    tensors = [on(torch, 0, data(SHAPE)) for _ in range(2)]

    def adding(tensor):
        return records(here, lambda: gr.add_n([tensor, tensor], output_type="cupy"))

    def terms():
        for tensor in tensors:
            counts.append(adding(tensor))
            yield tensor

    adding(tensors[0])
    counts = [adding(tensors[0])]
    with StreamScope():
        _held = to_buffer(tensors[0], mesh.devices[0])
        gr.aggregate(terms(), output_type="buffer")
    assert counts[1:] == counts[:1] * 2


@pytest.mark.parametrize("kind", ["torch", "cupy"])
def test_memory_that_a_stream_still_reads_is_not_reused(mesh, torch, kind):
    dropped(torch, mesh, kind)
    ended(torch, mesh)


@pytest.mark.parametrize("comes_in", [False, True])
def test_memory_that_a_per_thread_default_stream_reads_is_not_reused(mesh, comes_in):
    """In any thread that allocates: there this handle means another stream."""
    device = mesh.devices[0]
    mine = cupy.asarray(data(SHAPE))

    def read() -> cupy.ndarray:
        with cupy.cuda.Stream.ptds:
            made = from_buffer(device.upload(data(SHAPE)), "cupy")
            return made.copy()

    (kept,) = in_threads(read)
    with cupy.cuda.Stream.ptds:
        if comes_in:  # it does not wait for the other thread's stream
            to_buffer(mine, device)
        device.upload(np.zeros(SHAPE, "float32"))
    assert same(kept.get(), data(SHAPE))


def test_memory_that_cannot_be_marked_is_kept_and_the_error_raised(mesh, monkeypatch):
    def refuse(self, queue):
        raise DeprecationWarning("for a test")

    device = mesh.devices[0]
    array = device.release(device.upload(data(SHAPE)), cupy.cuda.Stream(non_blocking=True))
    address = array.data.ptr
    del array
    with monkeypatch.context() as patch, pytest.raises(DeprecationWarning, match="for a test"):
        patch.setattr(type(device), "_mark", refuse)
        device.drain()
    assert device.upload(data(SHAPE)).address != address


def test_a_stream_may_end_when_the_device_is_synchronized(mesh, torch, monkeypatch):
    """A stream known by its handle only (ExternalStream), which we cannot keep alive."""
    device, theirs = mesh.devices[0], cupy.cuda.Stream(non_blocking=True)
    now = SimpleNamespace(cuda_stream=theirs.ptr)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: now)
        from_buffer(device.upload(data(SHAPE)), "torch")
    device.synchronize()
    del theirs
    assert same(device.upload(data(SHAPE)).numpy(), data(SHAPE))


def test_a_callers_stream_may_end_inside_the_call(mesh):
    def terms():
        yield cupy.asarray(data(SHAPE))
        yield cupy.asarray(data(SHAPE))
        with cupy.cuda.Stream(non_blocking=True):
            yield cupy.asarray(data(SHAPE))

    method = gr.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N  # converts each term when it is made
    made = gr.aggregate(terms(), method, output_type="buffer")
    assert same(made.numpy(), data(SHAPE) * 3)


def test_a_loop_allocates_no_more_memory_however_far_the_host_is_ahead(mesh, here, torch):
    tensors = [on(torch, 0, data(SHAPE)) for _ in range(2)]
    taken = []
    for _ in range(6):
        result = gr.add_n(tensors)
        with torch.stream:
            result.array.copy()
        del result
        taken.append(len(here.heap._slots[0]))
    assert taken[2:] == taken[2:3] * 4


def test_results_of_a_prepared_step_belong_to_the_stream_that_used_them_last(mesh, torch):
    tensors = [on(torch, each.physical, data(SHAPE)) for each in mesh]
    step = gr.HierarchicalCopyAllReduce(mesh=mesh).prepare(
        SUM, [(gr.PerReplica(tensors, mesh), mesh)], output_type="cupy"
    )
    device = mesh.devices[0]
    theirs = cupy.cuda.Stream(non_blocking=True)
    with theirs:
        (made,) = step()
        kept = made.values[0].copy()
        del made, step
        fresh = [device.upload(np.zeros(SHAPE, "float32")) for _ in range(4)]
        assert same(kept.get(), data(SHAPE) * 3)
    assert same(fresh[0].numpy(), np.zeros(SHAPE, "float32"))


def test_a_stream_and_another_gpu_wait_for_each_others_uses_of_its_memory(mesh):
    """A caller's array, which its stream writes and another GPU reads."""
    _, near, away = mesh.devices
    stream, out = cupy.cuda.Stream(non_blocking=True), away.upload(data((400,)))
    with stream:
        array = cupy.asarray(data((400,)))
    buffer = near.adopt(array, stream)
    for _ in range(2):
        away.copy(out, buffer)
        near.block_stream(stream)
        cupy.cuda.runtime.memsetAsync(array.data.ptr, 0, array.nbytes, stream.ptr)
        near.wait_for_stream(stream)
