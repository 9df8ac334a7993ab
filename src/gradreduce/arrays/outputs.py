"""How a caller's array is written in place: as a Buffer, and then given back; never reads one.

What ``out=`` names comes through here, and only here. What comes in as an input is ``interop.py``'s
and never written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradreduce.device import Buffer, Device
from gradreduce.device.dtypes import BFLOAT16
from gradreduce.errors import DeviceMismatchError

from .caller_streams import StreamScope
from .convert import (
    axis_order,
    from_buffer,
    hand_over,
    in_order,
    inverse,
    kind_of,
    shape_and_dtype,
    to_buffer,
)
from .convert_gpu import Kind

__all__ = ["Out", "as_out", "count_writes", "release_outputs", "tensors_of"]


class Out(NamedTuple):
    """A caller's array that a call writes.

    Attributes:
        array: as it came.
        kind: of array.
        buffer: what to write, of its shape and dtype on the device asked for. On the array's own
            memory, except where ``copied`` is given.
        copied: the array, where its own memory cannot be written: it is not in C's order, or work
            is deferred and nobody could order it with the host. ``buffer`` is fresh there, and
            copied to it by ``release_outputs``.
    """

    array: Any
    kind: Kind
    buffer: Buffer
    copied: Any = None

    @property
    def address(self) -> int:
        """Where the caller's own memory begins."""
        if self.copied is None:
            return self.buffer.address
        if self.kind == "torch" and not isinstance(self.copied, np.ndarray):
            return int(self.copied.data_ptr())
        if self.kind == "cupy":
            return int(self.copied.data.ptr)
        return int(self.copied.__array_interface__["data"][0])


def as_out(
    array: Any,
    device: Device,
    shape: tuple[int, ...],
    dtype: np.dtype,
    order: tuple[int, ...] | None = None,
) -> Out:
    """``array`` as a Buffer that may be written; say ``release_outputs`` when all is queued.

    Our compute queue waits for the stream that is current in the array's library, once for each
    ``StreamScope``. What lies in a flat buffer of ``device`` is written on the block of that.

    Args:
        array: a Buffer; a NumPy array or CPU tensor, for the simulation; a CuPy array or CUDA
            tensor, for GPUs. Dense; with its axes in ``order`` of exactly this shape and dtype.
        device: where it lies: for a Buffer its own device, else one of the GPU's logical devices.
        shape: of what will be written.
        dtype: of what will be written.
        order: of the axes of the array in what is written; None: its own.

    Raises:
        TypeError: no array, or one that is never written (JAX's) or whose library shows no current
            stream.
        ValueError: another shape or dtype; read-only, not dense, a tensor that needs grad
            (outside ``torch.no_grad()``, or no leaf), or a lazy view of one.
        DeviceMismatchError: it lies elsewhere, or in the flat buffer of another device.
    """
    kind = kind_of(array)
    if kind in ("jax", "cuda") or not hasattr(array, "dtype"):
        why = {"jax": "is never written", "cuda": "shows no current stream: wrap it as CuPy's"}
        told = why.get(kind, "is no array")
        raise TypeError(f"{type(array).__name__} {told}; it cannot be an out")
    found = shape_and_dtype(array)
    wanted = shape if order is None else tuple([shape[axis] for axis in inverse(order)])
    if found != (wanted, dtype):
        raise ValueError(
            f"the out is {found[1]}{list(found[0])}; the result is {dtype}{list(wanted)}"
        )
    if kind == "buffer":
        return Out(array, kind, _checked_buffer(array, device))
    if kind == "native" and not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} is a number, no array; it cannot be an out")
    seen = array if order is None else in_order(array, order)
    if kind == "torch":
        return _torch_out(seen, device)._replace(array=array)
    if kind == "cupy":
        lies = int(array.device.id), array.data.ptr
        return Out(array, kind, *_gpu_buffer(seen, seen.flags.c_contiguous, lies, device))
    return Out(array, kind, *_host_buffer(np.asarray(seen), device))


def release_outputs(outs: Iterable[Out]) -> None:
    """Whoever uses these arrays next comes behind what is queued: their current streams wait.

    For host arrays the host waits, and where work is deferred it copies now. Buffers are in the
    order of their queues as it is. Call it once, when everything is launched.
    """
    with StreamScope():
        for out in outs:
            if out.kind == "buffer":
                continue
            if out.copied is None:
                hand_over(out.buffer, out.kind)
            elif isinstance(out.copied, np.ndarray):
                np.copyto(out.copied, out.buffer.device.release(out.buffer))
            else:  # in the order of its library's current stream
                out.copied[...] = from_buffer(out.buffer, out.kind)
            count_writes(tensors_of([out]))


def tensors_of(outs: Iterable[Out]) -> list[Any]:
    """The arrays among them whose library counts how often they were written."""
    found = [out.array for out in outs if out.kind == "torch" and not isinstance(out.array, Buffer)]
    return [tensor for tensor in found if not tensor.is_inference()]


def count_writes(tensors: Sequence[Any]) -> None:
    """So that autograd sees it, should it have kept one of them for a backward pass."""
    for tensor in tensors:
        sys.modules["torch"].autograd.graph.increment_version(tensor)


def _checked_buffer(buffer: Buffer, device: Device) -> Buffer:
    if buffer.device is not device:
        raise DeviceMismatchError(f"the out is {buffer}; the result lies on {device.name}")
    if not buffer.block.writable:
        raise ValueError(f"{buffer} is read-only; it cannot be an out")
    return buffer


def _torch_out(tensor: Any, device: Device) -> Out:
    torch = sys.modules["torch"]
    if tensor.requires_grad and (torch.is_grad_enabled() or not tensor.is_leaf):
        raise ValueError(
            "the out is a tensor that needs grad: pass its .detach(), or call in torch.no_grad()"
        )
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_conj() or plain.is_neg():
        raise ValueError("the out is a tensor whose memory does not hold its values as they are")
    if plain.is_cuda:
        lies = plain.device.index, plain.data_ptr()
        return Out(tensor, "torch", *_gpu_buffer(plain, plain.is_contiguous(), lies, device))
    if plain.device.type != "cpu":
        raise DeviceMismatchError(f"the out is on {plain.device}; the result lies on {device.name}")
    if plain.dtype is torch.bfloat16:
        host = plain.view(torch.int16).numpy().view(BFLOAT16)
    else:
        host = plain.numpy()
    return Out(tensor, "torch", *_host_buffer(host, device))


def _gpu_buffer(
    array: Any, contiguous: bool, lies: tuple[int, int], device: Device
) -> tuple[Buffer, Any]:
    """A CuPy array or tensor on its own memory and None; if not contiguous, a fresh one and it.

    Args:
        array: dense.
        contiguous: in C's order.
        lies: on which GPU, and at which address.
        device: where it must lie.
    """
    gpu, address = lies
    if device.mesh_state.backend == "sim" or gpu != device.physical:
        raise DeviceMismatchError(f"the out is on GPU {gpu}; the result lies on {device}")
    _check_lent(address, array.nbytes, device)
    if not contiguous:
        _check_dense(array)
        shape, dtype = shape_and_dtype(array)
        return device.empty(shape, dtype), array
    buffer = to_buffer(array, device)
    if not buffer.block.writable:
        raise ValueError("the out is read-only")
    return buffer, None


def _host_buffer(host: np.ndarray, device: Device) -> tuple[Buffer, np.ndarray | None]:
    """On the array's own memory and None; or, where that cannot be, a fresh one and the array."""
    if device.mesh_state.backend != "sim":
        raise DeviceMismatchError(f"the out is in host memory; the result lies on {device}")
    if not host.flags.writeable:
        raise ValueError("the out is read-only")
    contiguous = host.flags.c_contiguous and host.flags.aligned
    if not contiguous:
        _check_dense(host)
    _check_lent(host.__array_interface__["data"][0], host.nbytes, device)
    if contiguous:
        buffer = device.adopt(host)
        if not device.defers or buffer.block.owned:
            return buffer, None
    return device.empty(host.shape, host.dtype), host


def _check_dense(array: Any) -> None:
    """Raises ``ValueError`` for an array whose memory holds anything else between its elements."""
    if axis_order(array) is None:
        raise ValueError(
            "the out is not dense, or not aligned: pass one without gaps, such as a contiguous or "
            "channels_last array"
        )


def _check_lent(address: int, nbytes: int, device: Device) -> None:
    """Raises where it would be written past the queue that orders the use of a flat buffer."""
    for other in device.mesh.devices:
        if (
            other is not device
            and other.external_buffers is not None
            and other.external_buffers.find(address, nbytes)
        ):
            raise DeviceMismatchError(
                f"the out lies in a flat buffer of {other.name}; the result lies on {device.name}"
            )
