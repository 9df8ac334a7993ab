"""Lets a call write its results into arrays that the caller passed as ``out=``.

Only arrays of ``out=`` are written. Inputs are converted in ``convert.py`` and never written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradreduce.device import Buffer, Device
from gradreduce.errors import DeviceMismatchError

from .convert import (
    axis_order,
    from_buffer,
    hand_over,
    host_view,
    in_order,
    inverse,
    kind_of,
    shape_and_dtype,
    to_buffer,
)
from .convert_gpu import Kind


class Out(NamedTuple):
    """A caller's array that a call writes.

    Attributes:
        array: the caller's array.
        kind: the kind of the array.
        buffer: the Buffer to write, with the array's shape and dtype. It is on the array's own
            memory, unless ``copied`` is set.
        copied: the array, if its memory cannot be written directly: it is not in C order, or it is
            in host memory and commands are deferred. Then ``buffer`` is new memory, and
            ``release_outputs`` copies it to the array. Else None.
        address: the address of the caller's memory.
    """

    array: Any
    kind: Kind
    buffer: Buffer
    copied: Any
    address: int


def as_out(
    array: Any,
    device: Device,
    shape: tuple[int, ...],
    dtype: np.dtype,
    order: tuple[int, ...] | None = None,
) -> Out:
    """Wraps a caller's array as a Buffer to write; call ``release_outputs`` when all is queued.

    Our compute queue waits for the current stream of the array's library, once for each
    ``StreamScope``. For an array in a flat buffer of ``device``, the result is a view of that flat
    buffer.

    Args:
        array: a Buffer; for the simulation a NumPy array or CPU tensor; for GPUs a CuPy array or
            CUDA tensor. It must be dense, and have this shape (with its axes in ``order``) and
            dtype.
        device: the device of the array: for a Buffer its own device, else one of the GPU's logical
            devices.
        shape: the shape of the result.
        dtype: the dtype of the result.
        order: the order of the array's axes in the result; None: unchanged.

    Raises:
        TypeError: it is not an array, is immutable (JAX), or its library has no current stream to
            query.
        ValueError: it has another shape or dtype, is read-only or not dense, requires grad (outside
            ``torch.no_grad()``, or as a non-leaf tensor), or is a lazy view.
        DeviceMismatchError: it is on another device, or in the flat buffer of another device.
    """
    kind = kind_of(array)
    if kind == "jax" or (kind == "native" and not isinstance(array, np.ndarray)):
        number = "is a number, not an array" if isinstance(array, np.generic) else "is not an array"
        reason = "is immutable" if kind == "jax" else number
        raise TypeError(f"{type(array).__name__} {reason}; it cannot be used as out")
    found = shape_and_dtype(array)
    wanted = shape if order is None else tuple([shape[axis] for axis in inverse(order)])
    if found != (wanted, dtype):
        raise ValueError(f"out is {found[1]}{list(found[0])}; expected {dtype}{list(wanted)}")
    if kind == "buffer":
        return Out(array, kind, *_buffer_memory(array, device))
    seen = array if order is None else in_order(array, order)
    if kind == "torch":
        return Out(array, kind, *_tensor_memory(seen, device))
    if kind == "cupy":
        address, gpu = array.data.ptr, int(array.device.id)
        return Out(array, kind, *_gpu_memory(seen, seen.flags.c_contiguous, gpu, address, device))
    return Out(array, kind, *_host_memory(np.asarray(seen), device))


def overlaps(
    outs: Sequence[Out], inputs: Sequence[Buffer]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Finds arrays that share memory.

    Returns:
        Pairs of outs that share a byte. If there are none, pairs of an input and the first out that
        share a byte. All as indices.
    """
    starts = np.array([out.address for out in outs], np.int64)
    sizes = np.array([out.buffer.nbytes for out in outs], np.int64)
    order = starts.argsort(kind="stable")
    order = order[sizes[order] > 0]
    starts, stops = starts[order], (starts + sizes)[order]
    shared = np.flatnonzero(starts[1:] < stops[:-1])
    begins = np.array([part.address for part in inputs], np.int64)
    sizes = np.array([part.nbytes for part in inputs], np.int64)
    after = stops.searchsorted(begins, "right")  # the first out that ends after the begin
    ends = np.where(sizes > 0, begins + sizes, 0)
    found = np.flatnonzero(np.append(starts, ends.max(initial=0))[after] < ends)
    return (
        sorted(zip(order[shared].tolist(), order[shared + 1].tolist(), strict=True)),
        list(zip(found.tolist(), order[after[found]].tolist(), strict=True)),
    )


def release_outputs(outs: Iterable[Out]) -> None:
    """Makes the current streams of the arrays' libraries wait for the queued work.

    For host arrays the host waits, and copies now if commands are deferred. Buffers need no wait.
    Call it once in a ``StreamScope``, when all work is launched.
    """
    outs = [out for out in outs if out.kind != "buffer"]
    for kind in dict.fromkeys([out.kind for out in outs]):
        hand_over([out.buffer for out in outs if out.kind == kind and out.copied is None], kind)
    for out in outs:
        if out.copied is None:
            continue
        if isinstance(out.copied, np.ndarray):
            np.copyto(out.copied, out.buffer.device.release(out.buffer))
        else:  # on its library's current stream
            out.copied[...] = from_buffer(out.buffer, out.kind)
    count_writes(tensors_of(outs))


def tensors_of(outs: Iterable[Out]) -> list[Any]:
    """Returns the PyTorch tensors of the outs; their version counters count writes."""
    return [
        out.array
        for out in outs
        if out.kind == "torch"
        and not isinstance(out.array, Buffer)
        and not out.array.is_inference()
    ]


def count_writes(tensors: Sequence[Any]) -> None:
    """Increments the tensors' version counters, so that autograd notices the writes."""
    for tensor in tensors:
        sys.modules["torch"].autograd.graph.increment_version(tensor)


_OutMemory = tuple[Buffer, Any, int]  # ``Out.buffer``, ``copied`` and ``address``


def _buffer_memory(buffer: Buffer, device: Device) -> _OutMemory:
    """Checks a Buffer."""
    if buffer.device is not device:
        raise DeviceMismatchError(f"out is {buffer}; expected one on {device.name}")
    if not buffer.block.writable:
        raise ValueError(f"{buffer} is read-only: pass a writable array or Buffer as out")
    return buffer, None, buffer.address


def _tensor_memory(tensor: Any, device: Device) -> _OutMemory:
    """Wraps a tensor as a Buffer."""
    torch = sys.modules["torch"]
    if tensor.requires_grad and (torch.is_grad_enabled() or not tensor.is_leaf):
        raise ValueError(
            "out is a tensor that requires grad: pass its .detach(), or call in torch.no_grad()"
        )
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_conj() or plain.is_neg():
        raise ValueError("out is a sparse tensor or a lazy view: pass a plain dense tensor")
    if plain.is_cuda:
        return _gpu_memory(
            plain, plain.is_contiguous(), plain.device.index, plain.data_ptr(), device
        )
    if plain.device.type != "cpu":
        raise DeviceMismatchError(f"out is on {plain.device}; expected it on {device.name}")
    return _host_memory(host_view(plain), device)


def _gpu_memory(array: Any, contiguous: bool, gpu: int, address: int, device: Device) -> _OutMemory:
    """Wraps a GPU array as a Buffer.

    Args:
        array: a dense array.
        contiguous: whether it is in C order.
        gpu: its GPU.
        address: its address.
        device: the device on which it must be.
    """
    if device.mesh_state.shares_host_memory or gpu != device.physical:
        raise DeviceMismatchError(f"out is on GPU {gpu}; expected it on {device}")
    _check_flat_buffer(address, array.nbytes, device)
    if not contiguous:
        _check_dense(array)
        shape, dtype = shape_and_dtype(array)
        return device.empty(shape, dtype), array, address
    buffer = to_buffer(array, device)
    if not buffer.block.writable:
        raise ValueError("out is read-only; pass a writable array")
    return buffer, None, address


def _host_memory(host: np.ndarray, device: Device) -> _OutMemory:
    """Wraps a host array as a Buffer."""
    if not device.mesh_state.shares_host_memory:
        raise DeviceMismatchError(f"out is in host memory; expected it on {device}")
    flags = host.flags
    if not flags.writeable:
        raise ValueError("out is read-only; pass a writable array")
    if device.external_buffers.is_used:
        _check_flat_buffer(host.ctypes.data, host.nbytes, device)
    if not flags.carray:  # contiguous in C order, aligned and writable
        _check_dense(host)
    else:
        buffer = device.adopt(host) if device.defers else device.put(host)  # put would copy
        if buffer.block.owned or not device.defers:
            return buffer, None, buffer.address
    return device.empty(host.shape, host.dtype), host, host.ctypes.data


def _check_dense(array: Any) -> None:
    """Raises ``ValueError`` for an array with gaps between its elements."""
    if axis_order(array) is None:
        raise ValueError(
            "out is not dense, or not aligned: pass an array without gaps, such as a contiguous or "
            "channels_last one"
        )


def _check_flat_buffer(address: int, nbytes: int, device: Device) -> None:
    """Raises if the memory belongs to a flat buffer of another device."""
    block = device.external_buffers.find(address, nbytes)
    if block is not None and block.device is not device:
        raise DeviceMismatchError(
            f"out is in a flat buffer of {block.device.name}; expected one on {device.name}"
        )
