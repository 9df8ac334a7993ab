"""Terms that are IndexedSlices: concatenates their rows, or converts them to dense Buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from gradreduce import ops
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.distributed import Part, buffer_of, with_buffer
from gradreduce.arrays.indexed_slices import (
    IndexedSlices,
    check_indices,
    to_dense_n,
)
from gradreduce.backends.compile_ahead import compile_ahead
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.device import (
    Buffer,
    Device,
    can_access,
    flat_layout,
)

_RowMove = tuple[Buffer, Buffer]  # destination and source of rows


def require_shape(term: Buffer | IndexedSlices, *, alone: bool = False) -> tuple[int, ...]:
    """Returns the shape of a term; for IndexedSlices, that of the whole array.

    Raises:
        ValueError: it is the only term and its ``dense_shape`` is unknown.
        TypeError: it is one of several terms and its ``dense_shape`` is unknown. (TensorFlow raises
            these two types.)
    """
    if isinstance(term, Buffer):
        return term.shape
    if term.dense_shape is None or not term.is_known:
        error = ValueError if alone else TypeError
        raise error(
            f"dense_shape of {term} is unknown, but the sum needs it: pass dense_shape to "
            "IndexedSlices"
        )
    return term.dense_shape


def with_dense(terms: Sequence[Buffer | IndexedSlices]) -> list[Buffer]:
    """Returns the terms in order as dense Buffers; sparse ones are converted together.

    Args:
        terms: Buffers, and IndexedSlices of Buffers whose ``dense_shape`` is known.
    """
    sparse = [term for term in terms if isinstance(term, IndexedSlices)]
    made = iter(to_dense_n(sparse) if sparse else ())
    return [next(made) if isinstance(term, IndexedSlices) else term for term in terms]


def rehearse_parts(
    key: Hashable,
    parts: Sequence[Part],
    work: Callable[[DryRunMesh], object],
    others: Sequence[Device] = (),
) -> None:
    """Compiles the kernels of work on ``parts``; see ``compile_ahead``.

    Args:
        key: what the kernels depend on besides the parts and devices.
        parts: the operands of the work, on devices of one mesh.
        work: works on ``dry_run_parts`` of the parts.
        others: other devices of the work.
    """
    devices = (*others, *[buffer_of(part).device for part in parts])
    kinds = tuple([(type(part), part.dtype, buffer_of(part).size > 0) for part in parts])
    compile_ahead(devices, (key, kinds), work)


def dry_run_parts(dry_run: DryRunMesh, parts: Sequence[Part]) -> list[Part]:
    """Makes copies of parts on dry-run devices."""
    return [with_buffer(part, dry_run.buffer(buffer_of(part))) for part in parts]


def concatenate(terms: Sequence[IndexedSlices], kind: Kind) -> Any:
    """Concatenates the rows of all terms, on the device of the first one.

    One launch copies all rows that it can access. The result has the ``dense_shape`` of the first
    term; the others may differ, but no index may exceed it.

    Args:
        terms: at least one.
        kind: the kind of array of the result's values.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes of a row differ, or an index is not below the first ``dense_shape[0]``.
    """
    with StreamScope():
        placed = [term._in_buffer() for term in terms]
        return concatenate_slices(placed, placed[0].values.device)._as_result(kind)


def concatenate_slices(placed: Sequence[IndexedSlices], home: Device) -> IndexedSlices:
    """Concatenates the rows of IndexedSlices of Buffers, in new memory on ``home``."""
    parts: list[Buffer] = [term.values for term in placed]
    for index, part in enumerate(parts):
        if part.dtype != parts[0].dtype:
            raise TypeError(
                f"inputs have dtypes that don't all match: input 0 is {parts[0].dtype}, input "
                f"{index} is {part.dtype}"
            )
        if part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                "inputs must have rows of the same shape. Input 0: "
                f"{list(parts[0].shape[1:])} != input {index}: {list(part.shape[1:])}"
            )
    indices = ops.concatenate_indices([term.indices for term in placed])
    check_indices(indices, placed[0].dense_shape)
    whole = concatenate_rows(home, parts)
    return IndexedSlices.of(whole, indices, placed[0].dense_shape)


def concatenate_rows(home: Device, parts: Sequence[Buffer]) -> Buffer:
    """Concatenates rows of one shape and dtype in new memory on ``home``.

    One launch copies all rows that ``home`` can access. Rows on other devices arrive in one copy
    per device, where several are packed first.
    """
    num_rows = sum(part.shape[0] for part in parts)
    whole = home.empty((num_rows, *parts[0].shape[1:]), parts[0].dtype)
    local: list[_RowMove] = []
    remote: dict[Device, list[_RowMove]] = {}
    start = 0
    for part in parts:
        moves = local if can_access(home, part) else remote.setdefault(part.device, [])
        moves.append((whole.view(start, part.shape), part))
        start += part.size
    for moves in remote.values():
        if len(moves) == 1:
            home.copy(*moves[0])
        else:
            local += _copy_packed(home, moves)
    ops.pack_to_rows(local, home)
    return whole


def _copy_packed(home: Device, moves: Sequence[_RowMove]) -> list[_RowMove]:
    """Copies rows of one device and dtype to ``home`` through two flat buffers."""
    outs, parts = zip(*moves, strict=True)
    source, dtype = parts[0].device, parts[0].dtype
    layout = flat_layout([part.size for part in parts], dtype.itemsize)
    there, here = (device.empty((layout.size,), dtype) for device in (source, home))
    ops.pack(there.parts(layout.offsets, layout.sizes), parts, device=source)
    home.copy(here, there)
    return list(zip(outs, here.parts(layout.offsets, layout.sizes), strict=True))
