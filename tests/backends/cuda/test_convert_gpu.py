"""GPU arrays of other libraries are shared in both directions, in the right order.

PyTorch and JAX cannot be had on a machine without a GPU; what stands for them shows what the
validation looks at: a current stream, DLPack.
"""

from types import SimpleNamespace

import cupy
import pytest
from device.contract import data
from fake_cupy import foreign, machine
from fake_cupy.foreign import Tensor, made_on
from support.exact_data import same
from support.threads import in_threads

import gradreduce as gr
from gradreduce import ops
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import from_buffer, kind_of, to_buffer, to_buffers
from gradreduce.arrays.variable import Variable
from gradreduce.backends import open_mesh
from gradreduce.device import as_dtype, copy_to
from gradreduce.errors import CaptureError, DeviceMismatchError

pytestmark = pytest.mark.fake_cupy
SHAPE = (7, 30)
torch = foreign.torch


class JaxArray(Tensor):
    """An array that has no stream attribute, but waits for its own stream in DLPack."""

    def devices(self):
        return (SimpleNamespace(platform="gpu"),)


JaxArray.__module__ = "jaxlib"


def test_a_tensor_is_shared_in_the_order_of_pytorchs_stream(mesh, torch):
    array = made_on(torch.stream, data(SHAPE))
    buffer = to_buffer(Tensor(array), mesh.devices[1])
    assert buffer.device is mesh.devices[1]
    assert buffer.address == array.data.ptr
    assert same(mesh.devices[1].download(buffer), data(SHAPE))


@pytest.mark.parametrize("wrap", [Tensor, lambda array: array], ids=["torch", "cupy"])
def test_arrays_of_one_call_may_lie_on_any_gpu_in_any_order_of_axes(mesh, torch, wrap):
    wanted = [data(SHAPE, seed=seed) for seed in range(3)]
    arrays = [made_on(torch.stream, wanted[0])]
    arrays.append(made_on(torch.stream, wanted[1].T.copy()).transpose((1, 0)))  # copied
    with cupy.cuda.Device(1):
        arrays.append(cupy.asarray(wanted[2]))
        cupy.cuda.get_current_stream().synchronize()
    torch.stream.synchronize()
    homes = [mesh.devices[1], mesh.devices[1], mesh.devices[2]]
    for count in (2, 3):  # of one GPU, of two
        buffers = to_buffers(list(map(wrap, arrays[:count])), mesh.devices[1])
        assert [each.device for each in buffers] == homes[:count]
        assert buffers[0].address == arrays[0].data.ptr
        assert buffers[1].array_owner == "copy"
        assert all(map(same, [each.numpy() for each in buffers], wanted))


def test_tensors_of_one_call_may_be_on_the_host(mesh, torch):
    near, host = Tensor(made_on(torch.stream, data(SHAPE))), data(SHAPE, seed=1)
    far = Tensor(near.array)
    far.is_cuda, far.is_cpu, far.device = False, True, SimpleNamespace(type="cpu", index=None)
    far.numpy, far.data_ptr = lambda: host, lambda: host.ctypes.data
    with mesh.journal() as journal:
        buffers = to_buffers([near, far], mesh.devices[0])
    assert len(journal.of("upload")) == 1
    assert buffers[0].address == near.array.data.ptr
    assert same(buffers[1].numpy(), host)


def test_a_variable_on_a_tensor_is_written_in_the_order_of_pytorchs_stream(mesh, torch):
    array = made_on(torch.stream, data(SHAPE))
    tensor = Tensor(array)
    shared = Variable._on_buffers([to_buffer(tensor, mesh.devices[0])], "weight", trainable=True)
    shared._parameters = (tensor,)
    optimizer = gr.GradientDescentOptimizer(1.0)
    for turn in range(4):  # the second and later ones use the same plan
        optimizer.apply_gradients([(mesh.devices[0].upload(data(SHAPE)), shared)])
        with torch.stream:
            assert not array.get().any()
            array[...] = data(SHAPE)
        assert tensor.version == turn + 1
    shared.assign(data(SHAPE) * 2)
    with torch.stream:
        assert same(array.get(), data(SHAPE) * 2)


def test_bfloat16_is_shared_as_a_view(mesh, torch):
    values = data(SHAPE).astype(as_dtype("bfloat16"))
    tensor = Tensor(made_on(torch.stream, values), "bfloat16")
    buffer = to_buffer(tensor, mesh.devices[0])
    assert buffer.dtype == values.dtype
    back = from_buffer(buffer, "torch")
    assert back.dtype == "bfloat16"
    assert back.array.data.ptr == buffer.address
    with torch.stream:
        assert same(back.array.get(), values)


def test_a_tensor_on_a_gpu_outside_the_mesh_or_on_another_backend_is_refused(here, torch):
    tensor = Tensor(made_on(torch.stream, data(SHAPE)))
    with open_mesh([1], backend="cuda") as other, open_mesh(1, backend="sim") as sim:
        with pytest.raises(DeviceMismatchError, match="GPU 0, which is not in the mesh"):
            to_buffer(tensor, other.devices[0])
        with pytest.raises(DeviceMismatchError, match="sim:0 is simulated"):
            to_buffer(tensor, sim.devices[0])
        said = r"stream=0x\w+ was passed, but .*sim:0 .* has no streams"
        with pytest.raises(DeviceMismatchError, match=said):
            sim.devices[0].wait_for_stream(torch.stream)


def records(here, call) -> int:
    return here.counted(call)["record"]


def test_an_input_may_be_overwritten_when_the_call_has_returned(mesh, torch):
    array, device = made_on(torch.stream, data(SHAPE)), mesh.devices[0]
    with StreamScope():
        copy = copy_to(device, to_buffer(Tensor(array), device))
    with torch.stream:
        array[...] = -1
    assert same(copy.numpy(), data(SHAPE))


def test_calls_nest_and_a_later_one_fences_again(mesh, here):
    arrays = [cupy.asarray(data(SHAPE)) for _ in range(3)]
    device = mesh.devices[0]

    def nested(*, reads: bool):
        with StreamScope(reads=reads), StreamScope():
            for array in arrays:
                to_buffer(array, device)

    assert records(here, lambda: nested(reads=False)) == 1
    assert records(here, lambda: nested(reads=True)) == 2  # they may be overwritten then
    assert records(here, lambda: [to_buffer(array, device) for array in arrays]) == 3


def test_dlpack_is_called_as_cupy_calls_it(mesh, torch):
    asked = []

    class Recent(JaxArray):
        def __dlpack__(self, **said):
            asked.append(sorted(said))
            return super().__dlpack__(**said)

    class Old(JaxArray):  # an array of a library older than DLPack 1.0
        def __dlpack__(self, stream):
            asked.append("stream alone")
            return super().__dlpack__(stream=stream)

    for each in (Recent, Old):
        buffer = to_buffer(each(made_on(torch.stream, data(SHAPE))), mesh.devices[0])
        assert same(buffer.numpy(), data(SHAPE))
    assert asked == [["copy", "max_version", "stream"], "stream alone"]


def test_dlpack_is_not_called_while_cupys_stream_captures(mesh, torch):
    """DLPack would make that stream wait for the array's stream."""
    shown = JaxArray(made_on(torch.stream, data(SHAPE)))
    theirs = cupy.cuda.Stream(non_blocking=True)
    with theirs:
        theirs.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            with pytest.raises(CaptureError):
                to_buffer(shown, mesh.devices[0])
        finally:
            theirs.end_capture()
    assert same(to_buffer(shown, mesh.devices[0]).numpy(), data(SHAPE))


def test_a_tensor_is_accepted_where_cupys_stream_is_the_threads_default(mesh, torch):
    """PyTorch's DLPack cannot make that stream wait, so the tensor is shared by its address."""
    array = made_on(torch.stream, data(SHAPE))
    with cupy.cuda.Stream.ptds:
        buffer = to_buffer(Tensor(array), mesh.devices[0])
        assert same(from_buffer(buffer, "cupy").get(), data(SHAPE))


def test_a_threads_default_stream_is_its_own(gpus):
    def fill() -> None:
        with cupy.cuda.Stream.ptds:
            array[...] = 1

    gpus(1)
    array = cupy.asarray(data(SHAPE))
    in_threads(fill)
    with pytest.raises(machine.Fault, match="unordered: cupy fill on default of MainThread"):
        fill()
    gpus()  # whose faults are not those


def test_arrays_of_unsupported_libraries_are_refused():
    shown = type("Shown", (), {"__cuda_array_interface__": None})()
    with pytest.raises(TypeError, match=r"not supported; convert it by cupy\.asarray\(x\)$"):
        kind_of(shown)


def test_each_jax_array_of_a_call_is_waited_for(mesh, torch):
    """CuPy's current stream waits for each array when it is converted, so each has its own wait."""

    class Array(JaxArray):
        def __init__(self, stream) -> None:
            super().__init__(made_on(stream, data(SHAPE)))
            self.stream = stream

        def __dlpack__(self, stream):
            event = cupy.cuda.Event()
            event.record(self.stream)
            cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)
            return self.array

    with cupy.cuda.Stream(non_blocking=True):
        arrays = [Array(cupy.cuda.Stream(non_blocking=True)) for _ in range(3)]
        total = gr.PerReplica([arrays[0], arrays[1]], mesh[0:2])
        with StreamScope():
            buffers = [to_buffer(array, mesh.devices[0]) for array in arrays]
        out = mesh.devices[0].empty(SHAPE, "float32")
        ops.add_n([out], [buffers])
        assert same(out.numpy(), data(SHAPE) * 3)
        assert len(total.buffers) == 2
