"""Exchanges values with other processes: IndexedSlices of all, or tensors of one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradreduce import ops
from gradreduce.arrays.distributed import Part, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.comm.description import Description
from gradreduce.comm.process_group import group_of
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer, Device, DType, flat_layout, group_by, to_local

_PACK_BYTES = 1 << 26  # of tensors that are broadcast together


def slices_of_all(
    device: Device,
    parts: Sequence[IndexedSlices],
    *,
    mean: bool,
    coalesce: bool,
    names: Sequence[str] = (),
    compared: bool = False,
) -> list[IndexedSlices]:
    """Returns the IndexedSlices of all replicas of all processes, in order, on ``device``.

    The host waits twice: for the numbers of rows, which may differ, and for the indices.

    Args:
        device: a device of this process.
        parts: the replicas of this process, of one shape and dtype.
        mean: whether they will be divided, for the comparison with other processes.
        coalesce: whether equal rows will be added, for the same comparison.
        names: the name of the tensor; empty if it has none.
        compared: whether the name must equal those of the other processes, too.
    """
    what = {
        "call": "reduction of IndexedSlices",
        "op": "MEAN" if mean else "SUM",
        "coalesce": coalesce,
        "tensors": [_describe_part(parts[0])],
    }
    counts = Replicas([part.values.device for part in parts]).counts
    with Replicas([device]).call(Description.of(what, names, compared=compared)):
        return _exchange_slices(device, parts, counts)


def broadcast_from(rank: int, parts: Sequence[Part], names: Sequence[str] = ()) -> list[Part]:
    """Returns the values of one process, on devices of this process.

    Dense values of a dtype travel in packs of at most ``_PACK_BYTES``, a larger value alone.

    Args:
        rank: the rank of that process.
        parts: the values of this process, with the same shapes and dtypes; not written.
        names: the names of the tensors; empty if they have none.
    """
    device = buffer_of(parts[0]).device
    group = group_of(device)
    what = {
        "call": "broadcast",
        "process": rank,
        "tensors": [_describe_part(part) for part in parts],
    }
    values = list(parts)
    dense = {index: part for index, part in enumerate(parts) if isinstance(part, Buffer)}
    with Replicas([device]).call(Description.of(what, names, compared=False)):
        for index, part in enumerate(parts):
            if isinstance(part, IndexedSlices):
                home = part.values.device
                values[index] = _exchange_slices(home, [part], [1] * group.size)[rank]
        for indices in _plan_packs(dense):
            received = _broadcast_pack(rank, [dense[index] for index in indices])
            if group.rank != rank:
                for index, buffer in zip(indices, received, strict=True):
                    values[index] = buffer
    return values


def _plan_packs(parts: Mapping[int, Buffer]) -> list[list[int]]:
    """Returns the indices of the Buffers of each pack, the same in all processes."""
    packs: list[list[int]] = []
    for indices in group_by([(part.dtype, index) for index, part in parts.items()]).values():
        nbytes = math.inf
        for index in indices:
            nbytes += parts[index].nbytes
            if nbytes > _PACK_BYTES:
                packs.append([])
                nbytes = parts[index].nbytes
            packs[-1].append(index)
    return packs


def _broadcast_pack(rank: int, own: Sequence[Buffer]) -> list[Buffer]:
    """Returns Buffers of a process, of one dtype; ``own`` are those of this process."""
    home, dtype = own[0].device, own[0].dtype
    is_owner = group_of(home).rank == rank
    if len(own) == 1:
        pack = own[0] if is_owner else home.empty(own[0].shape, dtype)
        Replicas([home]).broadcast(rank, pack)
        return [pack]
    layout = flat_layout([part.size for part in own], dtype.itemsize)
    pack = home.empty((layout.size,), dtype)
    if is_owner:
        pieces = zip(layout.offsets, layout.spans, strict=True)
        local = [to_local(home, part) for part in own]
        ops.pack([pack.view(start, (span,)) for start, span in pieces], local, device=home)
    Replicas([home]).broadcast(rank, pack)
    return [pack.view(start, part.shape) for start, part in zip(layout.offsets, own, strict=True)]


def _describe_part(part: Part) -> str:
    if isinstance(part, Buffer):
        return f"{part.dtype}{list(part.shape)}"
    rows = part.values
    return f"{rows.dtype} rows of {list(rows.shape[1:])}, dense_shape {part.dense_shape}"


def _exchange_slices(
    device: Device, parts: Sequence[IndexedSlices], num_parts: Sequence[int]
) -> list[IndexedSlices]:
    """Sends values to all other processes; returns the values of all, in order.

    Args:
        device: the device of the results.
        parts: the values of this process.
        num_parts: the number of values of each process.
    """
    dense_shape, rows = parts[0].dense_shape, parts[0].values
    replicas = Replicas([device])
    with device.mesh_state.launch_lock:
        numbers = replicas.exchange_numbers([len(part.indices) for part in parts], num_parts)
        indices = [device.upload(part.indices) for part in parts]
        values = [to_local(device, part.values) for part in parts]
        shapes = [[(number,) for number in of_rank] for of_rank in numbers]
        all_indices = replicas.exchange_all(indices, shapes)
        shapes = [[(number, *rows.shape[1:]) for number in of_rank] for of_rank in numbers]
        all_values = replicas.exchange_all(values, shapes)
    return [
        IndexedSlices.of(buffer, device.download(of_rows), dense_shape)
        for buffer, of_rows in zip(all_values, all_indices, strict=True)
    ]


def describe_batch(  # noqa: PLR0913  # all values on which processes must agree
    settings: Any,
    gradients: Sequence[Sequence[Buffer]],
    divisor: float | None,
    out_dtypes: Sequence[DType] | None,
    *,
    counts: bool,
    call: str = "reduction",
    names: Sequence[str] = (),
    compared: bool = False,
    is_weighted: bool = False,
) -> Description | None:
    """Describes a batch for the comparison with other processes; None in one process."""
    replicas = Replicas.of(gradients[0])
    if replicas.group.size == 1:
        return None
    _ = replicas.counts  # checks the devices
    what = {
        "call": call,
        **settings._asdict(),
        "divisor": "a sum of weights" if divisor is None else divisor,
        "mean of integers": counts,
        "weights": is_weighted,
        "out dtypes": None if out_dtypes is None else [str(dtype) for dtype in out_dtypes],
        "tensors": [_describe_part(replicas[0]) for replicas in gradients],
    }
    return Description.of(what, names, compared=compared)
