"""Shares GPU arrays of CuPy, PyTorch and JAX with Buffers, in stream order.

This is the only module that queries streams of other libraries. It imports no array library: a GPU
array exists only if its library is in ``sys.modules``, and a CUDA mesh has imported CuPy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from gradreduce.device import BFLOAT16, Buffer, Device, Stream, as_dtype, handle_of
from gradreduce.errors import DeviceMismatchError

from .caller_streams import is_first, keep_alive, record_input

# "native": NumPy arrays and numbers; the results are NumPy arrays on the simulation, CuPy arrays on
# GPUs.
OWNED_BY_CALLER = ("torch", "cupy")  # JAX arrays never change
# "coo": torch.sparse_coo tensors, also as results; dense results are PyTorch tensors.
Kind = Literal["native", "numpy", "cupy", "torch", "jax", "buffer", "coo"]


# ---- in ------------------------------------------------------------------------------------------


def adopt_cupy(arrays: Sequence[Any], device: Device) -> list[Buffer]:
    """Wraps CuPy arrays as Buffers that wait for CuPy's current stream."""
    return _adopt_by_gpu(arrays, device, _current)


def adopt_torch(tensors: Sequence[Any], device: Device) -> list[Buffer]:
    """Wraps PyTorch tensors as Buffers that wait for PyTorch's current stream.

    Raises:
        CaptureError: PyTorch's current stream is capturing a CUDA graph.
        DeviceMismatchError: a tensor is on a GPU outside the mesh or in host memory, or the mesh is
            simulated.
        TypeError: it has no memory of its own (in ``torch.func``), or its dtype cannot be added.
    """
    _check_on_gpu(device)
    return _adopt_by_gpu(list(map(_cupy_of_torch, tensors)), device, _torch_stream)


def _torch_stream(gpu: int) -> Stream:
    """Returns the handle of PyTorch's current stream on a GPU."""
    return int(sys.modules["torch"].cuda.current_stream(gpu).cuda_stream)


def _cupy_of_torch(tensor: Any) -> Any:
    """Returns a CuPy array on a tensor's memory.

    It is made from the address: DLPack would make CuPy's stream wait for PyTorch's each time.
    """
    owner = tensor.detach()  # keeps the memory, also if the tensor gets other memory
    try:
        address = owner.data_ptr()
    except RuntimeError as error:
        raise not_readable(error) from None
    cuda, dtype, strides = sys.modules["cupy"].cuda, as_dtype(tensor.dtype), None
    nbytes = math.prod(tensor.shape) * dtype.itemsize
    if nbytes and not tensor.is_contiguous():
        strides = tuple(step * dtype.itemsize for step in tensor.stride())
        steps = zip(tensor.shape, strides, strict=True)
        nbytes = dtype.itemsize + sum((extent - 1) * step for extent, step in steps)
    pointer = cuda.MemoryPointer(cuda.UnownedMemory(address, nbytes, owner, tensor.device.index), 0)
    return sys.modules["cupy"].ndarray(tuple(tensor.shape), dtype, pointer, strides)


def not_readable(error: Exception) -> TypeError:
    """Returns the error for a tensor whose memory PyTorch does not show."""
    why = str(error).partition("\n")[0]
    return TypeError(f"the tensor cannot be read as an array: PyTorch says {why!r}")


def adopt_jax(array: Any, device: Device) -> Buffer:
    """Wraps a JAX array, which is immutable, as a Buffer on its GPU.

    JAX does not expose streams: DLPack makes CuPy's current stream wait for the array, and our
    queue waits for that stream.

    Raises:
        CaptureError: CuPy's current stream is capturing a CUDA graph.
        DeviceMismatchError: it is on a GPU outside the mesh, or the mesh is simulated.
    """
    _check_on_gpu(device)
    if is_first("check", device, _current(device.physical)):
        _check_streams(device)
    shared = sys.modules["cupy"].from_dlpack(array)
    (buffer,) = _adopt([shared], device, _current(int(shared.device.id)), writable=False)
    return buffer


def _check_on_gpu(device: Device) -> None:
    if not device.mesh_state.has_streams:
        raise DeviceMismatchError(
            f"the array is on a GPU, but {device.name} is simulated; copy the array to host "
            "memory, or open the mesh with backend='cuda'"
        )


def wait_for_inputs(buffers: Iterable[Buffer]) -> None:
    """Makes a call wait for the streams of callers' arrays that it reads.

    These are the current streams of their libraries, as if the arrays (for example of a
    ``PerReplica``) were passed in this call.
    """
    external = [
        buffer
        for buffer in buffers
        if buffer.array_owner in OWNED_BY_CALLER and buffer.device.mesh_state.has_streams
    ]
    for kind, device in dict.fromkeys((buffer.array_owner, buffer.device) for buffer in external):
        stream = current_of(device, str(kind))
        if is_first("enter", device, stream):
            device.wait_for_stream(stream)
        record_input(device, stream)
    keep_alive([buffer.block for buffer in external])


def _adopt_by_gpu(
    arrays: Sequence[Any], device: Device, stream_of: Callable[[int], Stream]
) -> list[Buffer]:
    """Wraps CuPy arrays that the current stream of their library has filled, on each GPU."""
    gpus = [int(array.device.id) for array in arrays]
    if len(set(gpus)) == 1 and all([array.flags.c_contiguous for array in arrays]):
        return _adopt(arrays, device, stream_of(gpus[0]))
    pairs = zip(arrays, gpus, strict=True)
    return [_adopt([array], device, stream_of(gpu))[0] for array, gpu in pairs]


def _adopt(
    arrays: Sequence[Any], device: Device, stream: Stream, *, writable: bool = True
) -> list[Buffer]:
    """Wraps CuPy arrays on one GPU as Buffers of the mesh, whose queue waits for ``stream``.

    At the end of the call ``stream`` waits for our queue, unless the arrays are immutable (JAX). A
    JAX array needs its own wait: CuPy's stream waits for this array only now.

    Args:
        arrays: contiguous arrays, or one array that is not.
        device: the device for arrays on its GPU; others go to the first device of their GPU.
        stream: the current stream of their library.
        writable: see ``Device.adopt``.
    """
    _check_on_gpu(device)
    gpu = int(arrays[0].device.id)
    home = device
    if device.physical != gpu:
        on_gpu = [each for each in device.mesh.devices if each.physical == gpu]
        if not on_gpu:
            raise DeviceMismatchError(
                f"the array is on GPU {gpu}, which is not in the mesh {device.mesh}"
            )
        home = on_gpu[0]
    if not arrays[0].flags.c_contiguous:
        return [_adopt_copy(arrays[0], home, stream, writable)]
    buffers = [home.adopt(array, writable=writable) for array in arrays]
    if not writable or is_first("enter", home, stream):
        home.wait_for_stream(stream, checked=not is_first("check", home, stream))
    if writable:
        record_input(home, stream)
        keep_alive([buffer.block for buffer in buffers])
    return buffers


def _adopt_copy(array: Any, home: Device, stream: Stream, writable: bool) -> Buffer:
    """Wraps a copy of a CuPy array that is not contiguous; see ``_adopt``."""
    current = sys.modules["cupy"].cuda.get_current_stream(home.physical)
    home.mesh_state.check_usable(home)
    _check_streams(home, stream)
    with array.device:  # CuPy copies on the current GPU and its current stream
        if stream is not current:
            event = sys.modules["cupy"].cuda.Event(disable_timing=True)
            sys.modules["cupy"].cuda.runtime.eventRecord(event.ptr, handle_of(stream))
            current.wait_event(event)
            record_input(home, stream, read=True)  # by CuPy's stream; ours waits for it
        array = array.copy()
    # Always wait: the copy is newer than any earlier wait.
    buffer = home.adopt(array, current, writable=writable)
    buffer.array_owner = "copy"
    return buffer


def _check_streams(device: Device, *streams: Stream) -> None:
    """Raises ``CaptureError`` if CuPy's current stream, or one of these, captures a CUDA graph."""
    for each in {_current(device.physical), *streams}:
        device.check_stream(each)


def _current(gpu: int) -> Stream:
    """Returns CuPy's current stream on a GPU."""
    return sys.modules["cupy"].cuda.get_current_stream(gpu)


# ---- out -----------------------------------------------------------------------------------------


def wait_for_current_stream(buffers: Iterable[Buffer], kind: Kind) -> None:
    """Makes our queues wait for the current streams of a library, once per GPU."""
    devices = {(each.device.mesh_state, each.device.physical): each.device for each in buffers}
    for device in devices.values():
        device.wait_for_stream(current_of(device, kind))


def current_of(device: Device, kind: str) -> Stream:
    """Returns the current stream of the library of ``kind``: PyTorch's own, else CuPy's.

    CuPy's stream is returned as its object, which keeps the stream alive as long as memory waits
    for it. PyTorch's is returned as a handle, because PyTorch's own streams never end.
    """
    if kind == "torch":
        return _torch_stream(device.physical)
    return _current(device.physical)


_NOTHING = nullcontext()


def on_gpu_of(device: Device | None) -> AbstractContextManager[Any]:
    """Context manager: CuPy uses the GPU of ``device``; no effect on simulated devices."""
    if device is None or not device.mesh_state.has_streams:
        return _NOTHING
    return device._activate()


def from_gpu(buffers: Sequence[Buffer], kind: Kind) -> Sequence[Any]:
    """Converts memory of one GPU to arrays of ``kind``, whose library's stream waits for ours."""
    if kind == "numpy":
        return [buffer.numpy() for buffer in buffers]
    device = buffers[0].device
    shared = release_to(current_of(device, kind), buffers)
    if kind == "torch":
        return [as_tensor(array, sys.modules["torch"].from_dlpack) for array in shared]
    if kind != "jax":
        return shared
    with on_gpu_of(device):  # CuPy makes JAX wait for the current stream of this GPU
        return list(map(sys.modules["jax"].dlpack.from_dlpack, shared))


def as_tensor(array: Any, share: Callable[[Any], Any]) -> Any:
    """Shares a NumPy or CuPy array with PyTorch by ``share``, also if it is bfloat16."""
    if array.dtype == BFLOAT16:
        return share(array.view("int16")).view(sys.modules["torch"].bfloat16)
    return share(array)


def release_to(consumer: Stream, buffers: Sequence[Buffer]) -> list[Any]:
    """Makes a caller's stream wait for our queue; returns the CuPy arrays of Buffers of a GPU."""
    if isinstance(consumer, int):  # ``release_all`` records other streams
        for buffer in buffers:
            buffer.block.record_stream(consumer)
    device = buffers[0].device
    return device.release_all(buffers, consumer, waited=not is_first("leave", device, consumer))
