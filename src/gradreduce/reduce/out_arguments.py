"""Checks the ``out`` argument of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from gradreduce.arrays.distributed import DistributedValues, ReduceOp
from gradreduce.arrays.outputs import Out, as_out, overlaps
from gradreduce.device import Buffer, mean_dtype
from gradreduce.errors import about, listed

from .arguments import Request


def with_outs(
    requests: Sequence[Request],
    out: Any,
    reduce_op: ReduceOp,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> tuple[list[Request], list[list[Out]]]:
    """Returns the requests with the Buffers of ``out``, and the arrays of ``out``.

    Args:
        requests: checked.
        out: see ``CrossDeviceOps.batch_reduce``.
        reduce_op: sets the dtypes of the results.
        shapes: of the results; default those of the values.

    Raises:
        ValueError: not one entry for each pair or not one array for each device of it, another
            shape or dtype, a read-only or non-contiguous array, an array that overlaps another
            one or an input that is not just this tensor, or IndexedSlices among the values.
        DeviceMismatchError: an array lies on another device.
        TypeError: not an array, or an immutable one.
    """
    if not isinstance(out, list | tuple) or len(out) != len(requests):
        count = f" of {len(out)}" if isinstance(out, list | tuple) else ""
        raise ValueError(
            f"out must be a list or tuple with one entry for each of {len(requests)} values, not "
            f"{type(out).__name__}{count}"
        )
    outs = [
        _outs_of(request, index, entry, reduce_op, shapes[index] if shapes else None)
        for index, (request, entry) in enumerate(zip(requests, out, strict=True))
    ]
    _check_overlap(requests, outs, in_place=shapes is None)
    checked = [
        Request(each.value, each.devices, tuple([made.buffer for made in row]), each.form)
        for each, row in zip(requests, outs, strict=True)
    ]
    return checked, outs


def _listed(request: Request, entry: Any) -> Sequence[Any]:
    """Returns the arrays of an entry of ``out``, one for each device."""
    if isinstance(entry, DistributedValues):
        entry = entry._in_memory_order() if request.form else entry  # of the same order then
        found = dict(zip(entry.devices, entry.buffers, strict=True))
        if set(found) != set(request.devices):
            names = [listed(d.name for d in each.devices) for each in (entry, request)]
            raise ValueError(f"it lies on {names[0]}, but the result on {names[1]}")
        if entry.kind == "jax":
            raise TypeError("JAX arrays are immutable; they cannot be used as out")
        if any(buffer.array_owner == "copy" for buffer in entry.buffers):
            raise ValueError(
                "its arrays were copied when it was made (host arrays for other memory, not "
                "contiguous or not aligned), so you would not see the results: pass a list of the "
                "arrays"
            )
        return [found[device] for device in request.devices]
    if not isinstance(entry, list | tuple) or len(entry) != len(request.devices):
        count = len(request.devices)
        found_count = f" of {len(entry)}" if isinstance(entry, list | tuple) else ""
        raise ValueError(
            f"it must be a PerReplica, Mirrored, list or tuple of {count} arrays, not "
            f"{type(entry).__name__}{found_count}"
        )
    return entry


def _outs_of(
    request: Request, index: int, entry: Any, reduce_op: ReduceOp, shape: tuple[int, ...] | None
) -> list[Out]:
    """Returns the arrays of an entry of ``out``, checked one by one."""
    value = request.value
    if value.is_sparse:
        raise ValueError(
            f"{value._name_of(index, of='out')} is not supported: its value contains "
            "IndexedSlices, and the number of rows of their sum is not known in advance"
        )
    try:
        arrays = _listed(request, entry)
    except (TypeError, ValueError) as error:
        raise about(value._name_of(index, of="out"), error) from None
    first = value.buffers[0]
    dtype = mean_dtype(first.dtype) if reduce_op is ReduceOp.MEAN else first.dtype
    made = []
    for replica, (array, device) in enumerate(zip(arrays, request.devices, strict=True)):
        try:
            turned = None if isinstance(array, Buffer) else request.form
            made.append(as_out(array, device, shape or first.shape, dtype, turned))
        except (TypeError, ValueError) as error:
            raise about(value._name_of(index, replica, "out"), error) from None
    if isinstance(entry, DistributedValues):  # its arrays are of this kind
        made = [each._replace(kind=entry.kind) for each in made]
    return made


def _check_overlap(
    requests: Sequence[Request], outs: Sequence[list[Out]], *, in_place: bool
) -> None:
    """Writes an out that is an input of its own value as that input.

    Raises:
        ValueError: an out shares memory with another one, or otherwise with an input.
    """
    arrays = list(chain.from_iterable(outs))
    inputs = [request.value.buffers for request in requests]
    among_outs, with_inputs = overlaps(arrays, list(chain.from_iterable(inputs)))
    if not (among_outs or with_inputs):
        return
    places = [(index, each) for index, row in enumerate(outs) for each in range(len(row))]
    sources = [(index, each) for index, row in enumerate(inputs) for each in range(len(row))]

    def name_of(place: int) -> str:
        index, replica = places[place]
        return requests[index].value._name_of(index, replica, "out")

    for pair in among_outs:
        names = [name_of(place) for place in pair]
        raise ValueError(f"{names[0]} and {names[1]} overlap; each must have its own memory")
    for at, place in with_inputs:
        (index, replica), (owner, number), out = sources[at], places[place], arrays[place]
        part = inputs[index][replica]
        if (owner, out.address, out.buffer.nbytes) != (index, part.address, part.nbytes):
            what = f"{name_of(place)} overlaps {requests[index].value._name_of(index, replica)}"
            if not in_place:
                raise ValueError(f"{what}; it must not share memory with an input")
            raise ValueError(
                f"{what}; an out may be a replica of its own value, but must not share memory with "
                "another input"
            )
        same = part.device is out.buffer.device and part.dtype == out.buffer.dtype
        if same and out.copied is None and part.block.writable:
            outs[owner][number] = out._replace(buffer=part)
