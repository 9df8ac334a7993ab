"""Where a caller wants the results of a reduction: checked, before anything is launched."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

from gradreduce.arrays.distributed import DistributedValues, Mirrored, ReduceOp
from gradreduce.arrays.outputs import Out, as_out
from gradreduce.device import Buffer, Device, mean_dtype
from gradreduce.errors import about, listed

from .arguments import Request

__all__ = ["as_results", "note_partial", "with_outs"]

_HALF = "This came half way through: what `out` names may hold a part of the results."


def with_outs(
    requests: Sequence[Request], out: Any, reduce_op: ReduceOp
) -> tuple[list[Request], list[list[Out]]]:
    """The requests with the Buffers that ``out`` names, and its arrays, to be handed back.

    Args:
        requests: checked.
        out: see ``CrossDeviceOps.batch_reduce``.
        reduce_op: which tells the dtypes of the results.

    Raises:
        ValueError: not one entry for each pair or not one array for each device of it, another
            shape or dtype, a read-only or non-contiguous array, an array that overlaps another
            one or an input that is not just this tensor, or IndexedSlices among the values.
        DeviceMismatchError: an array lies on another device.
        TypeError: what is no array, or is never written.
    """
    if not isinstance(out, list | tuple) or len(out) != len(requests):
        count = f" of {len(out)}" if isinstance(out, list | tuple) else ""
        raise ValueError(
            f"out must be a list or tuple with one entry for each of {len(requests)} values, not "
            f"{type(out).__name__}{count}"
        )
    given, outs = [], []
    for index, (request, entry) in enumerate(zip(requests, out, strict=True)):
        if request.value.is_sparse:
            raise ValueError(
                f"{request.value.name_of(index, of='out')} cannot be given: its value holds "
                "IndexedSlices, and the number of rows of their sum is not known yet"
            )
        try:
            arrays = _listed(request, entry)
        except (TypeError, ValueError) as error:
            raise about(request.value.name_of(index, of="out"), error) from None
        made = _outs_of(request, index, arrays, reduce_op)
        if isinstance(entry, DistributedValues):  # whose Buffers are arrays of this kind outside
            made = [each._replace(kind=entry.kind) for each in made]
        outs.append(made)
        given.append(request._replace(out=tuple(each.buffer for each in outs[-1])))
    _check_apart(given, outs)
    return given, outs


def note_partial(devices: Sequence[Device]) -> AbstractContextManager[None]:
    """Around the launches of a call with ``out``: an error in the middle of them says so."""
    return devices[0].mesh_state.note_partial(_HALF) if devices else nullcontext()


def as_results(requests: Sequence[Request], outs: Sequence[Sequence[Out]]) -> list[Mirrored]:
    """The arrays that a caller gave for each result; none if there are no outs."""
    return [_shown(*each) for each in zip(requests if outs else (), outs, strict=True)]


def _shown(request: Request, outs: Sequence[Out]) -> Mirrored:
    made = Mirrored.of([each.buffer for each in outs], outs[0].kind, request.form)
    if outs[0].kind == "buffer" or not isinstance(outs[0].array, Buffer):
        made.keep_arrays([each.array for each in outs])
    return made


def _listed(request: Request, entry: Any) -> Sequence[Any]:
    """One array for each device of the result, in its order."""
    if isinstance(entry, DistributedValues):
        entry = entry.as_it_lies() if request.form else entry  # of the same order then
        found = dict(zip(entry.devices, entry.buffers, strict=True))
        if set(found) != set(request.devices):
            names = [listed(d.name for d in each.devices) for each in (entry, request)]
            raise ValueError(f"it lies on {names[0]}, the result on {names[1]}")
        if entry.kind == "jax":
            raise TypeError("JAX arrays are never written; they cannot be an out")
        if any(buffer.array_owner == "copy" for buffer in entry.buffers):
            raise ValueError(
                "its arrays were copied when they came in (host arrays for another memory, not "
                "contiguous or not aligned): nobody would see what is written; give a list of them"
            )
        return [found[device] for device in request.devices]
    if not isinstance(entry, list | tuple) or len(entry) != len(request.devices):
        count = len(request.devices)
        came = f" of {len(entry)}" if isinstance(entry, list | tuple) else ""
        raise ValueError(
            f"it must be a PerReplica, Mirrored, list or tuple of {count} arrays, not "
            f"{type(entry).__name__}{came}"
        )
    return entry


def _outs_of(request: Request, place: int, arrays: Sequence[Any], reduce_op: ReduceOp) -> list[Out]:
    first = request.value.buffers[0]
    dtype = mean_dtype(first.dtype) if reduce_op is ReduceOp.MEAN else first.dtype
    made = []
    for replica, (array, device) in enumerate(zip(arrays, request.devices, strict=True)):
        try:
            turned = None if isinstance(array, Buffer) else request.form
            made.append(as_out(array, device, first.shape, dtype, turned))
        except (TypeError, ValueError) as error:
            raise about(request.value.name_of(place, replica, "out"), error) from None
    return [_as_input(out, request) for out in made]


def _as_input(out: Out, request: Request) -> Out:
    """With the Buffer of the input, if the array is one: so it has one block, and its fences."""
    for part in request.value.buffers:
        same = part.device is out.buffer.device and part.nbytes == out.buffer.nbytes
        if same and part.block.writable and part.address == out.buffer.address:
            return out._replace(buffer=part) if part.dtype == out.buffer.dtype else out
    return out


def _check_apart(requests: Sequence[Request], outs: Sequence[Sequence[Out]]) -> None:
    """Raises ``ValueError`` unless each out is apart from all others, and from other inputs."""
    spans = sorted(
        (each.address, each.address + each.buffer.nbytes, index)
        for index, row in enumerate(outs)
        for each in row
        if each.buffer.nbytes
    )
    for (_, stop, index), (start, _, other) in pairwise(spans):
        if start < stop:
            names = [requests[each].value.name_of(each, of="out") for each in (index, other)]
            raise ValueError(f"{names[0]} and {names[1]} overlap; each needs memory of its own")
    starts = [start for start, _, _ in spans]
    for index, request in enumerate(requests):
        for replica, part in enumerate(request.value.buffers):
            found = _overlapping(part, index, spans, starts)
            if found is not None:
                name = requests[found].value.name_of(found, of="out")
                raise ValueError(
                    f"{name} overlaps {request.value.name_of(index, replica)}; an out may be a "
                    "replica of its own value, and shares no memory with another"
                )


def _overlapping(
    part: Buffer, place: int, spans: Sequence[tuple[int, int, int]], starts: Sequence[int]
) -> int | None:
    """The place of an out that overlaps this input, unless it is the very same one."""
    begin, end = part.address, part.address + part.nbytes
    at = max(0, bisect_left(starts, begin) - 1)
    while begin < end and at < len(spans) and spans[at][0] < end:
        start, stop, other = spans[at]
        if stop > begin and (start, stop, other) != (begin, end, place):
            return other
        at += 1
    return None
