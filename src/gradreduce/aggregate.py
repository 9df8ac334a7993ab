"""How the terms of one gradient on one device become the gradient; never crosses devices.

Sources: tf.AggregationMethod, tf.add_n, tf.accumulate_n (aggregation_method.md). Where they leave
the order open, it is fixed here: ADD_N and ACCUMULATE_N add left to right, TREE in pairs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    as_dtype,
    compatible,
    default_mesh,
    gather,
    scatter,
)
from gradreduce.interop import OneCall, as_result_kind, from_buffer, kind_of, to_buffer
from gradreduce.values import IndexedSlices, current_replica

__all__ = [
    "AggregationMethod",
    "accumulate_n",
    "add_n",
    "aggregate",
    "aggregate_buffers",
    "as_aggregation_method",
]


class AggregationMethod(enum.IntEnum):
    """How the terms of a gradient are combined (tf.AggregationMethod).

    Attributes:
        ADD_N: all terms in one operation, which needs all of them at once.
        DEFAULT: the same as ``ADD_N``.
        EXPERIMENTAL_TREE: in pairs, and pairs of pairs: the error grows with log n instead of n.
            (This version reads all terms first.)
        EXPERIMENTAL_ACCUMULATE_N: into a single buffer, in the order of arrival. (This version
            reads all terms first.)
    """

    ADD_N = 0
    DEFAULT = 0
    EXPERIMENTAL_TREE = 1
    EXPERIMENTAL_ACCUMULATE_N = 2


def as_aggregation_method(method: AggregationMethod | int | None) -> AggregationMethod:
    """The member for 0, 1, 2 or a member; ``None`` is DEFAULT.

    Raises:
        ValueError: anything else.
    """
    if method is None:
        return AggregationMethod.DEFAULT
    try:
        return AggregationMethod(method)
    except ValueError:
        raise ValueError(
            f"Invalid aggregation_method specified: {method!r}; allowed: 0, 1, 2 or a member of "
            "AggregationMethod"
        ) from None


def add_n(inputs: Sequence[Any], name: str | None = None, *, as_kind: str | None = None) -> Any:
    """The sum of ``inputs``, left to right (tf.add_n).

    Halves are added in float32 and rounded once.

    Args:
        inputs: list or tuple of arrays of one shape and dtype (nothing is broadcast), on one
            device. A single one is returned itself.
        name: ignored; TensorFlow's name of the operation.
        as_kind: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or ``"buffer"``: what the result
            is instead of the kind of the first input.

    Returns:
        A new array of the kind of the first input; no input is written.

    Raises:
        ValueError: not a list or tuple, an empty one, ``None`` in it, or shapes differ.
        TypeError: dtypes differ, or one that cannot be added.
        NotImplementedError: IndexedSlices.
    """
    _check_inputs(inputs, "Tensor/IndexedSlices")
    if len(inputs) == 1:
        _refuse_sparse(inputs[0])
        kind_of(inputs[0])
        return inputs[0]
    return _aggregate(list(inputs), AggregationMethod.ADD_N, TypeError, as_kind)


def accumulate_n(
    inputs: Sequence[Any],
    shape: Sequence[int | None] | None = None,
    tensor_dtype: Any = None,
    name: str | None = None,
    *,
    as_kind: str | None = None,
) -> Any:
    """The sum of ``inputs`` in one buffer, in the order of the list (tf.accumulate_n).

    Args:
        inputs: list or tuple of arrays of one shape and dtype, on one device. A single one is
            returned itself.
        shape: what their shape must be; None entries fit any extent.
        tensor_dtype: what their dtype must be.
        name: ignored; TensorFlow's name of the operation.
        as_kind: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or ``"buffer"``: what the result
            is instead of the kind of the first input.

    Returns:
        A new array of the kind of the first input; no input is written.

    Raises:
        ValueError: not a list or tuple, an empty one, ``None`` in it, dtypes or shapes differ, or
            a shape other than ``shape``.
        TypeError: a dtype other than ``tensor_dtype``, or one that cannot be added.
        NotImplementedError: IndexedSlices.
    """
    _check_inputs(inputs, "Tensor")
    buffers = [_on_current_device(term) for term in inputs]
    for buffer in buffers:
        if shape is not None and not compatible(buffer.shape, shape):
            raise ValueError(f"Shapes {buffer.shape} and {tuple(shape)} are not compatible")
    if tensor_dtype is not None and buffers[0].dtype != as_dtype(tensor_dtype):
        raise TypeError(f"tensor_dtype is {tensor_dtype}, the inputs are {buffers[0].dtype}")
    if len(inputs) == 1:
        return inputs[0]
    method = AggregationMethod.EXPERIMENTAL_ACCUMULATE_N
    return _aggregate(list(inputs), method, ValueError, as_kind)


def aggregate(
    terms: Iterable[Any],
    method: AggregationMethod | int | None = AggregationMethod.DEFAULT,
    *,
    as_kind: str | None = None,
) -> Any:
    """The gradient that ``terms`` make, combined by an aggregation method.

    Args:
        terms: arrays of one shape and dtype, on one device; ``None`` among them is left out. An
            iterable is read to its end first.
        method: an ``AggregationMethod``, its number, or None for DEFAULT.
        as_kind: what the result is instead of the kind of the first term; see ``add_n``.

    Returns:
        A new array of the kind of the first term; a single term itself; None without any.

    Raises:
        ValueError: an invalid method (even for a single term), or shapes differ.
        TypeError: dtypes differ, or a term that is no array.
        NotImplementedError: IndexedSlices.
    """
    method = as_aggregation_method(method)
    present = [term for term in terms if term is not None]
    if not present:
        return None
    for term in present:
        _refuse_sparse(term)
        kind_of(term)
    if len(present) == 1:
        return present[0]
    return _aggregate(present, method, TypeError, as_kind)


def aggregate_buffers(
    gradients: Sequence[Sequence[Buffer]], method: AggregationMethod, device: Device
) -> list[Buffer]:
    """Each list of terms becomes one gradient; the same launches serve all of them.

    Args:
        gradients: for each gradient its terms, at least one, all of one shape and dtype.
        method: how to combine them.
        device: whose queue launches; it reaches all terms. Comes behind the queues of the terms'
            devices, and they behind it.

    Returns:
        One Buffer for each gradient, on its first term's device: a new one, or the term itself
        where there is only one.
    """
    made = [terms[0] for terms in gradients]
    direct, folded = [], []
    for place, terms in enumerate(gradients):
        if len(terms) == 2 or (len(terms) > 2 and method is AggregationMethod.ADD_N):
            direct.append(place)
        elif len(terms) > 2:
            folded.append(place)
    for place in direct:
        made[place] = _empty_like(made[place], made[place].dtype)
    homes = [terms[0].device for terms in gradients]
    gather(device, homes)  # always behind the allocations: a block's last user may be its home
    ops.add_n(
        [made[place] for place in direct], [gradients[place] for place in direct], device=device
    )
    fold = _tree if method is AggregationMethod.EXPERIMENTAL_TREE else _one_buffer
    totals = fold([gradients[place] for place in folded], device)
    rounded = []
    for place, total in zip(folded, totals, strict=True):
        made[place] = total
        if total.dtype != gradients[place][0].dtype:
            made[place] = _empty_like(total, gradients[place][0].dtype)
            rounded.append((made[place], total))
    gather(device, [out.device for out, _ in rounded])
    ops.pack([out for out, _ in rounded], [total for _, total in rounded], device=device)
    scatter(device, homes)
    return made


def _one_buffer(gradients: Sequence[Sequence[Buffer]], device: Device) -> list[Buffer]:
    """The first two terms make the buffer, every later one goes into it."""
    totals = [_empty_like(terms[0], accumulate_dtype(terms[0].dtype)) for terms in gradients]
    gather(device, [total.device for total in totals])
    ops.add_n(totals, [terms[:2] for terms in gradients], device=device)
    ops.accumulate_n(totals, [terms[2:] for terms in gradients], device=device)
    return totals


def _tree(gradients: Sequence[Sequence[Buffer]], device: Device) -> list[Buffer]:
    """Pairs, then pairs of pairs; the launches of a level serve all gradients.

    A pair of terms makes a new buffer; a later pair goes into its left one, which is ours.
    """
    levels = [list(terms) for terms in gradients]
    first = True
    while any(len(level) > 1 for level in levels):
        pairs = [pair for level in levels for pair in zip(level[::2], level[1::2], strict=False)]
        if first:
            sums = [_empty_like(left, accumulate_dtype(left.dtype)) for left, _ in pairs]
            gather(device, [total.device for total in sums])
            ops.add_n(sums, pairs, device=device)
        else:
            sums = [left for left, _ in pairs]
            ops.accumulate_n(sums, [[right] for _, right in pairs], device=device)
        first = False
        remaining = iter(sums)
        levels = [
            [next(remaining) for _ in range(len(level) // 2)] + level[len(level) // 2 * 2 :]
            for level in levels
        ]
    return [level[0] for level in levels]


def _aggregate(
    terms: list[Any],
    method: AggregationMethod,
    dtype_error: type[Exception],
    as_kind: str | None,
) -> Any:
    """The door of the public calls: arrays of one shape and dtype in, one array out."""
    with OneCall():
        buffers = [_on_current_device(term) for term in terms]
    first = buffers[0]
    for place, buffer in enumerate(buffers):
        if buffer.dtype != first.dtype:
            raise dtype_error(
                f"inputs have dtypes that don't all match: input 0 is {first.dtype}, input "
                f"{place} is {buffer.dtype}"
            )
        if buffer.shape != first.shape:
            raise ValueError(
                "inputs must have the same size and shape (nothing is broadcast). Input 0: "
                f"{list(first.shape)} != input {place}: {list(buffer.shape)}"
            )
        if buffer.device is not first.device:
            raise NotImplementedError(
                f"terms on several devices: input 0 on {first.device.name}, input {place} on "
                f"{buffer.device.name}"
            )
    kind = as_result_kind(as_kind, kind_of(terms[0]))
    return from_buffer(aggregate_buffers([buffers], method, first.device)[0], kind)


def _on_current_device(term: Any) -> Buffer:
    """``term`` on the device of the enclosing ``gr.replica``, else on device 0; Buffers stay."""
    _refuse_sparse(term)
    if isinstance(term, Buffer):
        return term
    kind_of(term)
    mesh = default_mesh()
    index = current_replica() or 0
    if index >= len(mesh.devices):
        raise ValueError(f"replica {index} of a mesh of {len(mesh.devices)} devices")
    return to_buffer(term, mesh.devices[index])


def _check_inputs(inputs: Any, what: str) -> None:
    if not isinstance(inputs, list | tuple) or not inputs or any(term is None for term in inputs):
        raise ValueError(
            f"inputs must be a list of at least one {what} with the same dtype and shape, got "
            f"{inputs!r}"
        )


def _refuse_sparse(term: Any) -> None:
    if isinstance(term, IndexedSlices):
        raise NotImplementedError("IndexedSlices (sparse gradients) are not implemented yet")


def _empty_like(buffer: Buffer, dtype: DType) -> Buffer:
    return buffer.device.empty(buffer.shape, dtype)
