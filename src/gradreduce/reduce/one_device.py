"""Adds a value's replicas on one device, and copies one array to many devices.

Used for values that cannot be all-reduced: with destinations other than the value's devices, and
IndexedSlices, whose rows differ. Source: tf.distribute.ReductionToOneDevice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradreduce import ops
from gradreduce.arrays.convert import from_buffer, kind_of, to_buffer
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices, coalesce_n
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    by_physical,
    ensure_accessible,
    mean_dtype,
    to_local,
)
from gradreduce.ops import plan_segments
from gradreduce.sums.exact_terms import sum_exactly
from gradreduce.sums.slices import concatenate_slices, with_dense

Accumulate = Callable[[list[Any]], Any]


def sum_on(
    device: Device,
    parts: Sequence[Part],
    *,
    mean: bool = False,
    coalesce: bool = False,
    accumulate: Accumulate | None = None,
    kind: Kind = "buffer",
    exact: bool = False,
) -> Part:
    """Adds one value's replicas left to right, in new memory on ``device``; sum or mean.

    If all replicas are IndexedSlices, concatenates their rows.

    Args:
        device: the device that adds. Replicas that it cannot access are copied to it first.
        parts: the replicas, in order, of one shape and dtype.
        mean: divide by the number of replicas; if all are IndexedSlices, every row.
        coalesce: add rows with the same index, if all are IndexedSlices.
        accumulate: the caller's function that adds a list of arrays on ``device``, or None.
        kind: the kind of arrays that are passed to it.
        exact: whether dense replicas are added as real numbers.

    Raises:
        ValueError: ``accumulate`` returned another shape or dtype than the replicas'.
    """
    sparse = [part for part in parts if isinstance(part, IndexedSlices)]
    divisor = len(parts) if mean else 1
    counts = mean and parts[0].dtype.kind in "iu"  # whose mean has another dtype
    if len(sparse) == len(parts):
        return _rows_on(device, sparse, divisor, coalesce=coalesce, counts=counts)
    dense = with_dense(parts)
    if accumulate is None:
        buffers = [ensure_accessible(device, buffer) for buffer in dense]
    else:  # the caller's function may launch anything
        local = [to_local(device, buffer) for buffer in dense]
        buffers = [_call_accumulate(device, local, accumulate, kind)]
    total = device.empty(buffers[0].shape, buffers[0].dtype)
    add = sum_exactly if exact else ops.all_sum
    add([[total]], [buffers], divisor=1 if counts else divisor, device=device)
    return quotients([total], divisor)[0] if counts else total


def quotients(
    sums: Sequence[Buffer], divisor: float, dtypes: Sequence[DType] | None = None
) -> list[Buffer]:
    """Divides sums in new memory; buffers on one GPU share a launch.

    Args:
        sums: the sums, either all of integers or all of floats.
        divisor: divides each sum.
        dtypes: the dtypes of the results; default: those of means.
    """
    dtypes = dtypes or [mean_dtype(total.dtype) for total in sums]
    outs = [
        total.device.empty(total.shape, dtype) for total, dtype in zip(sums, dtypes, strict=True)
    ]
    for indices in by_physical([out.device for out in outs]).values():
        here, terms = [outs[index] for index in indices], [sums[index] for index in indices]
        if terms[0].dtype.kind in "iu":
            ops.divide(here, terms, divisor, device=here[0].device)
        else:
            ops.all_sum(
                [[out] for out in here],
                [[term] for term in terms],
                divisor=divisor,
                device=here[0].device,
            )
    return outs


def copy_to_each(
    part: Part,
    devices: Sequence[Device],
    out: Sequence[Buffer] | None = None,
    *,
    keep: bool = False,
) -> tuple[Part, ...]:
    """Copies ``part`` to each of ``devices``, into ``out`` or new memory.

    It is transferred to each other GPU once. ``out`` is only for a Buffer, and may contain ``part``
    itself. With ``keep`` the result on the device of ``part`` is ``part`` itself.
    """
    if isinstance(part, IndexedSlices):
        copies = copy_to_each(part.values, devices, keep=keep)  # all share the read-only indices
        return tuple([part._with_values(rows) for rows in copies])
    outs = out or [
        part if keep and device is part.device else device.empty(part.shape, part.dtype)
        for device in devices
    ]
    for physical, indices in by_physical(devices).items():
        rest = [outs[index] for index in indices if outs[index] is not part]
        local = part
        if rest and physical != part.device.physical:
            local = rest.pop(0)
            local.device.copy(local, part)
        if rest:
            ops.all_sum([rest], [[local]], device=local.device)
    return tuple(outs)


def _rows_on(
    device: Device, parts: Sequence[IndexedSlices], divisor: float, *, coalesce: bool, counts: bool
) -> IndexedSlices:
    rows = concatenate_slices(parts, device)
    values, indices, first = rows.values, rows.indices, 1 if counts else divisor
    if coalesce:
        segments = plan_segments(indices)
        (values,), indices = coalesce_n([values], [segments], divisors=[first]), segments.indices
    elif first != 1:
        ops.all_sum([[values]], [[values]], divisor=first, device=device)
    if counts:
        (values,) = quotients([values], divisor)
    return IndexedSlices.of(values, indices, rows.dense_shape)


def _call_accumulate(
    device: Device, buffers: Sequence[Buffer], accumulate: Accumulate, kind: Kind
) -> Buffer:
    """Calls the caller's function; returns its sum in memory that ``device`` can read."""
    like = buffers[0]
    made = accumulate([from_buffer(buffer, kind) for buffer in buffers])
    kind_of(made)
    total = to_buffer(made, device)
    if (total.shape, total.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"accumulation_fn returned {total.dtype}{list(total.shape)}; expected "
            f"{like.dtype}{list(like.shape)}, as its inputs are"
        )
    return ensure_accessible(device, total)
