"""Gradient clipping by global norm, without waiting for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from gradreduce import ops
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import as_result_kind, from_buffer, host_array, kind_of, to_buffer
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.distributed import Mirrored, Part, PerReplica, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.replica_context import current_device
from gradreduce.arrays.types import OptionalT, OutputType
from gradreduce.backends.compile_ahead import compile_rows
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    as_dtype,
    as_positive,
    ensure_accessible,
)
from gradreduce.errors import about


@overload
def clip_by_global_norm(
    t_list: Sequence[OptionalT],
    clip_norm: float,
    use_norm: Any = None,
    name: str | None = None,
    *,
    output_type: None = None,
) -> tuple[list[OptionalT], Any]: ...
@overload
def clip_by_global_norm(
    t_list: Sequence[Any],
    clip_norm: float,
    use_norm: Any = None,
    name: str | None = None,
    *,
    output_type: OutputType | None = None,
) -> tuple[list[Any], Any]: ...
@StreamScope()
def clip_by_global_norm(
    t_list: Sequence[Any],
    clip_norm: float,
    use_norm: Any = None,
    name: str | None = None,
    *,
    output_type: OutputType | None = None,
) -> tuple[list[Any], Any]:
    """Scales gradients so that their global norm is at most ``clip_norm``.

    Each tensor ``t`` becomes ``t * clip_norm * min(1 / norm, 1 / clip_norm)``. The norm is the
    square root of the sum of the squares of all elements. It is computed in float64, in a fixed
    order, so that it has the same bits every time and on every backend. The number of launches
    depends on the number of dtypes, not on the number of tensors. The host waits only for
    ``use_norm``. Source: ``tf.clip_by_global_norm``.

    Args:
        t_list: a list of float arrays of any library, Buffers, ``IndexedSlices``, and None, which
            stays None. Or a list of ``Mirrored`` tensors on the same devices: each device clips its
            own copies. For ``IndexedSlices`` the values are clipped; as in TensorFlow, rows with
            the same index are not added first.
        clip_norm: the largest norm; above 0.
        use_norm: the norm, if you know it: a number, or an array of one element. Default: the norm
            is computed.
        name: ignored; TensorFlow's name of the operation.
        output_type: the array type of the results: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"``
            or ``"buffer"``. Default: each result has the type of its tensor.

    Returns:
        A list of new arrays on the device of the first tensor, and the norm. If an element is
        infinite or NaN, the norm is infinite or NaN, and all results are NaN. For ``Mirrored``
        tensors, the results and the norm are ``Mirrored``.

    Raises:
        TypeError: ``t_list`` is not a list or tuple, a tensor is not an array or is ``PerReplica``
            (reduce it first), or only some tensors are ``Mirrored``.
        ValueError: ``clip_norm`` is not above 0, a tensor is not of a float dtype, or ``Mirrored``
            tensors are on different devices.

    Example:
        >>> clipped, norm = gr.clip_by_global_norm([np.float32([3, 0]), np.float32([4])], 2.5)
        >>> clipped
        [array([1.5, 0. ], dtype=float32), array([2.], dtype=float32)]
        >>> norm
        array(5., dtype=float32)
    """
    if not isinstance(t_list, list | tuple):
        raise TypeError(f"t_list should be a list or tuple, got {type(t_list).__name__}")
    limit = as_positive("clip_norm", float(clip_norm))
    norm = None if use_norm is None else float(host_array(use_norm))
    present = {index: each for index, each in enumerate(t_list) if each is not None}
    for index, each in present.items():
        if isinstance(each, PerReplica):
            raise TypeError(
                f"t_list[{index}] is a PerReplica, whose replicas differ; reduce it first"
            )
    if not present:
        return list(t_list), norm or 0.0
    if any(isinstance(each, Mirrored) for each in present.values()):
        clipped, result_norm = _clip_mirrored(present, limit, norm)
    else:
        clipped, result_norm = _plain(present, limit, norm, output_type)
    results = iter(clipped)
    return [None if each is None else next(results) for each in t_list], result_norm


def _plain(
    present: Mapping[int, Any], limit: float, norm: float | None, output_type: str | None
) -> tuple[list[Any], Any]:
    parts = {index: _to_part(index, each) for index, each in present.items()}
    kinds = [
        as_result_kind(output_type, each.kind if isinstance(each, IndexedSlices) else kind_of(each))
        for each in present.values()
    ]
    clipped, result_norm = _clip_parts(
        parts, limit, norm, buffer_of(next(iter(parts.values()))).device
    )
    results = [
        part._as_result(kind) if isinstance(part, IndexedSlices) else from_buffer(part, kind)
        for part, kind in zip(clipped, kinds, strict=True)
    ]
    return results, from_buffer(result_norm, kinds[0])


def _clip_mirrored(
    present: Mapping[int, Any], limit: float, norm: float | None
) -> tuple[list[Any], Any]:
    at, first = next((index, each) for index, each in present.items() if isinstance(each, Mirrored))
    for index, mirrored in present.items():
        if not isinstance(mirrored, Mirrored):
            raise TypeError(
                f"t_list[{at}] is Mirrored, but t_list[{index}] is {type(mirrored).__name__}; "
                "all or none must be Mirrored"
            )
        if mirrored.devices != first.devices:
            raise ValueError(
                f"t_list[{at}] and t_list[{index}] are on different devices; all Mirrored "
                "tensors must be on the same ones"
            )
        mirrored._discard_copies()
    columns = zip(*(mirrored.parts for mirrored in present.values()), strict=True)
    on_each = [
        _clip_parts(dict(zip(present, parts, strict=True)), limit, norm, device)
        for device, parts in zip(first.devices, columns, strict=True)
    ]
    rows = zip(*(clipped for clipped, _ in on_each), strict=True)
    clipped_values = [
        Mirrored.of(parts, mirrored.kind)
        for parts, mirrored in zip(rows, present.values(), strict=True)
    ]
    return clipped_values, Mirrored.of([result_norm for _, result_norm in on_each], first.kind)


def _to_part(index: int, tensor: Any) -> Part:
    try:
        if isinstance(tensor, IndexedSlices):
            return tensor._in_buffer()
        return tensor if isinstance(tensor, Buffer) else to_buffer(tensor, current_device())
    except (TypeError, ValueError) as error:
        raise about(f"t_list[{index}]", error) from None


def _clip_parts(
    parts: Mapping[int, Part], limit: float, norm: float | None, home: Device
) -> tuple[list[Part], Buffer]:
    """Returns clipped copies on ``home``, and the norm in the accumulate dtype."""
    buffers = [buffer_of(part) for part in parts.values()]
    for index, buffer in zip(parts, buffers, strict=True):
        if buffer.dtype.kind not in "fV":  # bfloat16 is of kind V in ml_dtypes
            raise ValueError(f"t_list[{index}] is {buffer.dtype}; it must be of a float dtype")
    wait_for_inputs(buffers)
    accessible = [ensure_accessible(home, buffer) for buffer in buffers]
    acc_dtype = accumulate_dtype(buffers[0].dtype)
    compile_rows(
        f"clip to {acc_dtype}",
        lambda rows, at: _launch([each for (each,) in rows], acc_dtype, limit, None, at),
        {(buffer.dtype,) for buffer in buffers},
        home,
    )
    outs, result_norm = _launch(accessible, acc_dtype, limit, norm, home)
    clipped = [
        IndexedSlices.of(out, part.indices.copy(), part.dense_shape)
        if isinstance(part, IndexedSlices)
        else out
        for part, out in zip(parts.values(), outs, strict=True)
    ]
    return clipped, result_norm.view(0, ())


def _launch(
    buffers: Sequence[Buffer], acc_dtype: DType, limit: float, norm: float | None, home: Device
) -> tuple[list[Buffer], Buffer]:
    """Returns clipped copies on ``home``, and the norm in one element of ``acc_dtype``."""
    outs = [home.empty(buffer.shape, buffer.dtype) for buffer in buffers]
    result_norm = home.empty((1,), acc_dtype)
    if norm is not None:
        total = to_buffer([norm], home, dtype=as_dtype("float64"))
    else:
        total = ops.norm_of(ops.block_sums(buffers, home))
    ops.clip(outs, buffers, total, limit=limit, device=home)
    ops.pack([result_norm], [total], device=home)
    return outs, result_norm
