"""Converts arrays of NumPy, CuPy, PyTorch and JAX to Buffers and back.

Only this module, ``convert_gpu.py`` (arrays on GPUs) and ``flat_arrays.py`` use other array
libraries.

They do not import them: a caller who passes an array has imported its library, which is then in
``sys.modules``. On simulated devices arrays are shared as NumPy arrays on the same host memory.
bfloat16 is passed as a 16-bit view, because neither NumPy's DLPack nor PyTorch's ``numpy()``
supports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, get_args

import numpy as np

from gradreduce.device import BFLOAT16, Buffer, Device, as_dtype, group_by
from gradreduce.errors import DeviceMismatchError, brief

from .convert_gpu import (
    Kind,
    adopt_cupy,
    adopt_jax,
    adopt_torch,
    as_tensor,
    current_of,
    from_gpu,
    not_readable,
    release_to,
)
from .types import OutputType

_OUTPUT_TYPES = get_args(OutputType)
# The order of a caller's axes in the Buffer; None: the same.
Form = tuple[int, ...] | None
PLAIN = (np.ndarray, Buffer)  # dense, and on the host or on a device of ours
_MODULES: dict[str, Kind] = {"cupy": "cupy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}
_ONLY_OF_ARRAYS = {"cupy": "get", "torch": "layout", "jax": "devices"}  # attributes of arrays only


def kind_of(value: Any) -> Kind:
    """Returns the kind of array that a result for ``value`` has.

    Raises:
        TypeError: ``value`` cannot be an array.
    """
    return _kind_of_class(type(value))  # type: ignore[arg-type]  # classes are hashable


@cache  # a library's subclasses and tracers count as its arrays
def _kind_of_class(cls: type) -> Kind:
    if issubclass(cls, Buffer):
        return "buffer"
    if is_masked(cls):
        raise TypeError("a masked array would lose its mask: pass .filled(0)")
    if issubclass(cls, np.ndarray | np.generic | int | float | complex | list | tuple):
        return "native"
    for ancestor in cls.__mro__:
        kind = _MODULES.get(ancestor.__module__.partition(".")[0])
        if kind is not None and hasattr(cls, _ONLY_OF_ARRAYS[kind]):
            return kind
    if hasattr(cls, "__cuda_array_interface__"):  # Numba, RMM, ...
        raise TypeError(
            f"{cls.__name__} is of a library that is not supported; convert it by cupy.asarray(x)"
        )
    hint = getattr(cls, "_hint", "")  # of traced values of ``autodiff``
    raise TypeError(f"{cls.__name__} is not an array, a list of numbers or a Buffer{hint}")


def as_result_kind(output_type: str | None, kind: Kind, device: Device | None = None) -> Kind:
    """Returns the kind of the results: ``output_type`` if not None, else ``kind``.

    Raises:
        ValueError: the name is unknown, the library is not imported, or it is CuPy and ``device``
            is simulated.
    """
    if output_type is None:
        return kind
    if output_type not in _OUTPUT_TYPES:
        raise ValueError(f"output_type={brief(output_type)} is not one of {_OUTPUT_TYPES}")
    if output_type in ("cupy", "torch", "jax") and output_type not in sys.modules:
        raise ValueError(
            f"output_type={brief(output_type)}: {output_type} is not imported; import it first"
        )
    if output_type == "cupy" and device is not None and device.mesh_state.shares_host_memory:
        raise ValueError(
            f"output_type='cupy': {device.name} is simulated and its memory is on the host; CuPy "
            "arrays need a GPU"
        )
    if output_type == "torch" and kind == "coo":
        return kind
    return output_type  # type: ignore[return-value]  # one of the literals, checked above


def as_view_kind(output_type: str | None, device: Device | None, use: str) -> Kind:
    """Returns the kind of arrays on the memory of ``device``; ``use``: their use, for errors.

    Raises:
        ValueError: what ``as_result_kind`` raises; or the kind is JAX, or NumPy for a GPU.
    """
    kind = as_result_kind(output_type, "native", device)
    if kind == "jax":
        raise ValueError(
            f"output_type='jax': JAX arrays are immutable and cannot be {use}; use another type"
        )
    if kind == "numpy" and device is not None and not device.mesh_state.shares_host_memory:
        raise ValueError(
            f"output_type='numpy': {device.name} is a GPU, whose memory NumPy cannot access"
        )
    return kind


def is_array(value: Any) -> bool:
    """Whether ``value`` has its own dtype; lists and Python numbers have none."""
    return hasattr(value, "dtype")


def is_bool(value: Any) -> bool:
    """Whether ``value`` is a boolean, or an array of booleans of any library."""
    dtype = getattr(value, "dtype", None)
    return isinstance(value, bool) or (dtype is not None and str(dtype) in ("bool", "torch.bool"))


def bool_view(value: Any, *, as_bytes: bool) -> Any:
    """Returns a view of an array of booleans as uint8, or of such an array as booleans."""
    value = np.asarray(value) if isinstance(value, bool) else value
    name = "uint8" if as_bytes else "bool"
    return value.view(getattr(sys.modules["torch"], name) if kind_of(value) == "torch" else name)


def is_masked(cls: type) -> bool:
    """Whether objects of a class are masked arrays, a part of NumPy that this does not import."""
    masked = getattr(sys.modules.get("numpy.ma.core"), "MaskedArray", None)
    return masked is not None and issubclass(cls, masked)


def is_module(cls: type, kind: str = "Module") -> bool:
    """Whether objects of a class are modules of PyTorch of a kind, such as ``ModuleList``."""
    nn = getattr(sys.modules.get("torch"), "nn", None)
    return nn is not None and issubclass(cls, getattr(nn, kind))


def as_list(value: Any) -> Any:
    """Returns a ``ModuleList`` of PyTorch as a list, other values unchanged."""
    return list(value) if is_module(type(value), "ModuleList") else value


def axis_order(array: Any) -> tuple[int, ...] | None:
    """Returns the axis order that makes an array contiguous; None for C order or gaps.

    For a channels_last tensor (0, 2, 3, 1). Also None for arrays of libraries other than NumPy,
    CuPy and PyTorch.
    """
    try:
        kind = kind_of(array)
        if kind == "torch":
            check_tensor(array)
    except TypeError:
        return None  # its conversion raises an error later
    if kind == "torch":
        if array.layout is not sys.modules["torch"].strided or array.is_contiguous():
            return None
        strides = array.stride()
    elif kind in ("native", "cupy") and hasattr(array, "flags") and not array.flags.c_contiguous:
        strides = array.strides
    else:
        return None
    order = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
    turned = in_order(array, order)
    dense = turned.is_contiguous() if kind == "torch" else turned.flags.c_contiguous
    return order if dense else None


def common_order(arrays: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the ``axis_order`` that all arrays share, with equal shape and dtype; else None."""
    order = axis_order(arrays[0])
    if order is None:
        return None
    like = [(axis_order(each), shape_and_dtype(each)) for each in arrays if is_array(each)]
    return order if len(like) == len(arrays) and like.count(like[0]) == len(like) else None


def in_order(array: Any, order: tuple[int, ...]) -> Any:
    """Returns a view of an array of any library with its axes in another order."""
    return array.permute(order) if kind_of(array) == "torch" else array.transpose(order)


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the order that undoes ``in_order``."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def is_coo(value: Any) -> bool:
    """Whether ``value`` is a ``torch.sparse_coo`` tensor."""
    if type(value) in PLAIN:  # a missing attribute is slow to look up
        return False
    return getattr(value, "is_sparse", False) is True and hasattr(value, "sparse_dim")


def shape_and_dtype(array: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and NumPy dtype of an array of any library, or of a Buffer.

    Raises:
        TypeError: it is not an array, or its dtype cannot be added.
    """
    if kind_of(array) == "torch":
        check_tensor(array)
        return tuple(array.shape), as_dtype(str(array.dtype).removeprefix("torch."))
    return tuple(array.shape), as_dtype(array.dtype)


def host_array(value: Any) -> np.ndarray:
    """Returns ``value`` as a NumPy array of any dtype, possibly on the caller's memory.

    Do not write it. Waits for the device of a Buffer or a GPU array.

    Raises:
        TypeError: it is not an array, number or nested list, or has no values in memory.
        ValueError: a nested list is ragged.
    """
    kind = kind_of(value)
    if kind == "buffer":
        value = value.numpy()
    elif kind == "cupy":
        value = value.get()
    elif kind == "jax":
        check_traced(value)
    elif kind == "torch":
        check_tensor(value)
        value = value.detach().cpu()
        if value.dtype is sys.modules["torch"].bfloat16:
            value = value.float()  # NumPy has no bfloat16
    return np.asarray(value)


def host_view(tensor: Any) -> np.ndarray:
    """Returns a PyTorch tensor in host memory as a NumPy array on its memory."""
    torch = sys.modules["torch"]
    if tensor.dtype is torch.bfloat16:  # PyTorch cannot convert it
        return host_view(tensor.view(torch.int16)).view(BFLOAT16)
    return tensor.numpy()  # type: ignore[no-any-return]


def to_buffer(value: Any, device: Device, *, dtype: np.dtype | None = None) -> Buffer:
    """Converts ``value`` to a Buffer, on the same memory where possible.

    After the end of the enclosing ``StreamScope`` the caller may overwrite it, in the order of its
    library's current stream; so all work that reads it must be queued inside the scope.

    Args:
        value: a Buffer, which stays on its device; an array of NumPy, CuPy, PyTorch or JAX; a
            number or nested list. An array that is not contiguous is copied. A read-only array can
            only be an input.
        device: the device for a value in host memory. A GPU array stays on its GPU: on ``device``
            if that is on the GPU, else on the GPU's first logical device.
        dtype: the dtype of numbers and lists; arrays keep their own. Default: NumPy's choice.

    Raises:
        DeviceMismatchError: a Buffer of another mesh, or an array on a GPU outside the mesh.
        TypeError: the dtype cannot be added, the value is not an array, or its values are not in
            its memory: a tensor of a subclass, nested or sparse; an array that JAX is tracing.
        ValueError: a tensor requires grad, JAX has deleted the array, a nested list is ragged, or
            numbers do not fit ``dtype``.
    """
    return to_buffers([value], device, dtype=dtype)[0]


def of_one_type(values: Sequence[Any]) -> bool:
    """Whether all values are arrays of one type, which ``to_buffers`` converts together."""
    return len(set(map(type, values))) == 1 and hasattr(values[0], "dtype")


def to_buffers(
    values: Sequence[Any], device: Device, *, dtype: np.dtype | None = None
) -> list[Buffer]:
    """Converts values of one type, at least one, like ``to_buffer``; waits once for all."""
    kind: str = "native"
    if type(values[0]) is np.ndarray:  # the most frequent type takes the fewest calls
        buffers = device.put_all(values)
    else:
        # What the library of the values does might hang in a forked child.
        device.mesh_state.check_process()
        kind = kind_of(values[0])
        if kind == "buffer":
            return _check_mesh(values, device)
        if kind != "native":
            buffers = _CONVERTERS[kind](values, device)
        elif isinstance(values[0], np.ndarray):
            buffers = device.put_all(values)
        else:
            kind = "copy"
            arrays = [value if is_array(value) else numbers(value, dtype) for value in values]
            buffers = device.put_all(arrays)
    for buffer in buffers:
        if buffer.array_owner is None:  # set already if the array was copied
            block = buffer.block  # pool memory contains only copies and flat buffers
            buffer.array_owner = "copy" if block.owned and block.gaps is None else kind
    return buffers


def _check_mesh(buffers: Sequence[Buffer], device: Device) -> list[Buffer]:
    """Returns Buffers of the device's mesh; raises ``DeviceMismatchError`` for others."""
    for buffer in buffers:
        if buffer.device.mesh_state is not device.mesh_state:
            raise DeviceMismatchError(
                f"{buffer} belongs to another mesh than {device.name}; pass its .numpy()"
            )
    return list(buffers)


def from_buffer(buffer: Buffer, kind: Kind) -> Any:
    """Converts ``buffer`` to an array of ``kind``, on the same memory where possible.

    These are copied: NumPy arrays of GPU memory, tensors of read-only memory, and JAX arrays that
    JAX itself copies: bfloat16 in host memory, memory with another alignment than JAX wants, and
    64-bit types without its x64 mode (JAX converts them to 32 bits: large integers lose their upper
    half).

    Raises:
        ValueError: a CuPy array of simulated memory.
    """
    return from_buffers([buffer], kind)[0]


def from_buffers(buffers: Sequence[Buffer], kind: Kind) -> Sequence[Any]:
    """Converts Buffers of one device like ``from_buffer``, with one wait for all."""
    if kind == "buffer" or not buffers:
        return buffers
    kind = "torch" if kind == "coo" else kind
    device = buffers[0].device
    if device.mesh_state.has_streams:
        return from_gpu(buffers, kind)
    if kind == "cupy":
        raise ValueError(f"{buffers[0]} is in host memory and cannot be converted to a CuPy array")
    arrays = device.release_all(buffers)
    if kind == "torch":
        return list(map(_to_torch, arrays))
    return list(map(_to_jax, arrays)) if kind == "jax" else arrays


def numbers(value: Any, dtype: np.dtype | None) -> np.ndarray:
    """Converts a number or nested list to a host array of ``dtype``.

    Raises:
        TypeError: the dtype cannot be added.
        ValueError: a nested list is ragged, or numbers do not fit ``dtype``.
    """
    array = np.asarray(value)
    if dtype is not None:
        kinds = {"f": "fiub", "c": "cfiub", "i": "iub", "u": "iub", "V": "fiub"}
        if array.size and array.dtype.kind not in kinds[dtype.kind]:
            raise ValueError(f"cannot convert {array.dtype} numbers to {dtype}")
        numbers, array = array, cast_array(array, dtype)
        if dtype.kind in "iu" and (array != numbers).any():
            raise ValueError(f"numbers out of range for {dtype}: {brief(value)}")
    as_dtype(array.dtype)
    return array


def cast_array(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts a host array to another dtype; floats that are too large become infinite."""
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def hand_over(buffers: Iterable[Buffer], kind: Kind) -> None:
    """Makes the library of ``kind`` wait for the work queued on the Buffers."""
    for device, on_device in group_by([(each.device, each) for each in buffers]).items():
        if device.mesh_state.shares_host_memory:
            device.release_all(on_device)
        else:
            release_to(current_of(device, kind), on_device)


# ---- PyTorch -------------------------------------------------------------------------------------


_NESTED = "nested tensors are not arrays: pass .to_padded_tensor(0), or the parts"
_UNSUPPORTED = {
    "DTensor": "a DTensor is distributed over processes: pass .to_local()",
    "FakeTensor": "a FakeTensor has no values: call this outside FakeTensorMode and torch.compile",
    "NestedTensor": _NESTED,
}


def check_tensor(tensor: Any) -> None:
    """Raises ``TypeError`` unless this is a plain tensor, whose memory contains its values."""
    why = _why_unsupported(type(tensor))  # type: ignore[arg-type]  # classes are hashable
    if why:
        raise TypeError(why)
    if getattr(tensor, "is_nested", False):
        raise TypeError(_NESTED)


@cache
def _why_unsupported(cls: type) -> str:
    """Returns why tensors of a class are not supported; empty if they are."""
    if (
        cls.__name__ in ("Tensor", "Parameter", "Buffer")
        and cls.__module__.partition(".")[0] == "torch"
    ):
        return ""
    for ancestor in cls.__mro__:
        if ancestor.__name__ in _UNSUPPORTED:
            return _UNSUPPORTED[ancestor.__name__]
    return (
        f"{cls.__name__} is a subclass of torch.Tensor, whose memory may hold other values: pass "
        "a plain tensor, such as .as_subclass(torch.Tensor)"
    )


def check_memory(array: Any) -> None:
    """Checks that the memory of an array holds each of its elements.

    A tensor from a file may have strides of 0, and then has many more elements than the file.

    Raises:
        TypeError: it is a sparse tensor, or of a class that is not supported.
        ValueError: its elements share memory.
    """
    if kind_of(array) == "torch":
        check_tensor(array)
        _check_strided(array)
        if array.numel() * array.element_size() > array.untyped_storage().nbytes():
            raise ValueError("the elements of the tensor share memory: pass .contiguous()")


def _check_strided(tensor: Any) -> None:
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"a tensor with layout {tensor.layout} is not an array: pass .to_dense()")


def check_traced(array: Any) -> None:
    """Raises ``TypeError`` for a value that JAX is tracing."""
    if any(ancestor.__name__ == "Tracer" for ancestor in type(array).__mro__):
        raise TypeError(
            f"{type(array).__name__} is traced by JAX and has no values yet: call this outside "
            "jax.jit, grad and vmap"
        )


def _from_torch(tensors: Sequence[Any], device: Device) -> list[Buffer]:
    plain = list(map(_as_plain, tensors))
    on_gpu = {tensor.is_cuda for tensor in plain}
    if len(on_gpu) > 1:
        return [_from_torch([tensor], device)[0] for tensor in tensors]
    if True in on_gpu:
        buffers = adopt_torch(plain, device)
    else:
        memory = list(map(_host_memory, plain))
        buffers = device.put_all([array for array, _ in memory], [at for _, at in memory])
    for buffer, tensor, passed in zip(buffers, plain, tensors, strict=True):
        if tensor is not passed:
            buffer.array_owner = "copy"
    return buffers


def _as_plain(tensor: Any) -> Any:
    """Returns a tensor whose memory contains its values: itself, or a copy of a lazy view."""
    check_tensor(tensor)
    if tensor.requires_grad:
        raise ValueError("the tensor requires grad: pass tensor.detach()")
    _check_strided(tensor)
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _host_memory(tensor: Any) -> tuple[np.ndarray, int]:
    """Returns a tensor in host memory as a NumPy array, and its address."""
    if not tensor.is_cpu:
        raise DeviceMismatchError(f"the tensor is on {tensor.device}; pass one on cpu or cuda")
    try:
        return host_view(tensor), tensor.data_ptr()
    except (TypeError, RuntimeError) as error:  # in torch.func, quantized, ...
        raise not_readable(error) from None


def _to_torch(array: Any) -> Any:
    """Shares a host array with PyTorch; copies a read-only one, which tensors cannot be."""
    array = array if array.flags.writeable else array.copy()
    return as_tensor(array, sys.modules["torch"].from_numpy)


# ---- JAX -----------------------------------------------------------------------------------------


def _from_jax(arrays: Sequence[Any], device: Device) -> list[Buffer]:
    return [_from_one_jax(array, device) for array in arrays]  # each needs its own wait


def _from_one_jax(array: Any, device: Device) -> Buffer:
    check_traced(array)
    try:
        indices = array.devices()
    except RuntimeError as error:  # deleted, or donated to a jitted function
        raise ValueError(
            f"the JAX array was deleted or donated: {str(error)!r}; pass it before that"
        ) from None
    if len(indices) != 1:
        raise ValueError(
            f"the JAX array is sharded over {len(indices)} devices; pass one that is on one device"
        )
    (index,) = indices
    if index.platform == "cpu":
        return device.put(np.asarray(array))
    if index.platform not in ("gpu", "cuda"):
        raise DeviceMismatchError(f"the JAX array is on {index}; pass one on cpu or gpu")
    return adopt_jax(array, device)


def _to_jax(array: Any) -> Any:
    """Converts a host array to a JAX array, without a copy if JAX can."""
    jax = sys.modules["jax"]
    if array.dtype == BFLOAT16 or not array.flags.writeable:
        with jax.default_device(jax.devices("cpu")[0]):  # JAX's default may be a GPU
            return jax.numpy.asarray(array)
    return jax.dlpack.from_dlpack(array)


_CONVERTERS: dict[Kind, Callable[[Sequence[Any], Device], list[Buffer]]] = {
    "torch": _from_torch,
    "jax": _from_jax,
    "cupy": adopt_cupy,
}
