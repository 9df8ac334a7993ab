"""What becomes of IndexedSlices among the terms of one gradient; never adds dense arrays.

All terms sparse: one IndexedSlices of all their rows, one term after the other; what has the same
index stays apart until ``coalesce()``. Some sparse: each of those is made dense, a term like any
other. Source: TensorFlow's aggregation of gradients and add_n, from 2.x on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    copy_over,
    flat_layout,
    gather,
    reaches,
    scatter,
)
from gradreduce.indexed_slices import IndexedSlices, check_indices, densified
from gradreduce.interop import Kind, OneCall, kind_of

__all__ = [
    "all_sparse",
    "concatenated",
    "joined",
    "kind_of_term",
    "known_shape",
    "rows_together",
    "with_dense",
]

_Move = tuple[Buffer, Buffer]  # rows: where to, and where they are


def kind_of_term(term: Any) -> Kind:
    """Which kind of array a result for ``term`` is: of IndexedSlices, that of the values.

    Raises:
        TypeError: neither IndexedSlices nor an array.
    """
    return term.kind if isinstance(term, IndexedSlices) else kind_of(term)


def all_sparse(terms: Sequence[Any]) -> TypeGuard[Sequence[IndexedSlices]]:
    """Whether no term is a dense array."""
    return all(isinstance(term, IndexedSlices) for term in terms)


def known_shape(term: Buffer | IndexedSlices, *, alone: bool = False) -> tuple[int, ...]:
    """The shape of a term, made dense if it is sparse.

    Raises:
        ValueError: it is the only term and its ``dense_shape`` is unknown.
        TypeError: it is one of several. (Two types for one fault, because TensorFlow has them.)
    """
    if isinstance(term, Buffer):
        return term.shape
    if term.dense_shape is None or not term.is_known:
        error = ValueError if alone else TypeError
        raise error(f"dense_shape of {term} is unknown: it says how large the sum is")
    return term.dense_shape


def with_dense(terms: Sequence[Buffer | IndexedSlices]) -> list[Buffer]:
    """The terms in their order, those that are sparse made dense, all of them together.

    Args:
        terms: Buffers, and IndexedSlices of Buffers whose ``dense_shape`` is known.
    """
    sparse = [term for term in terms if isinstance(term, IndexedSlices)]
    made = iter(densified(sparse) if sparse else ())
    return [next(made) if isinstance(term, IndexedSlices) else term for term in terms]


def concatenated(terms: Sequence[IndexedSlices], kind: Kind) -> Any:
    """The rows of all terms, one term after the other, on the device of the first one.

    One launch copies all that it reaches. ``dense_shape`` is that of the first term; the others'
    are not compared with it, but no index may leave it.

    Args:
        terms: at least one.
        kind: which kind of array the values of the result are.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes of a row differ, or an index is not below the first ``dense_shape[0]``.
    """
    with OneCall():
        placed = [term.placed() for term in terms]
        return joined(placed, placed[0].values.device).shown(kind)


def joined(placed: Sequence[IndexedSlices], home: Device) -> IndexedSlices:
    """As ``concatenated``, of IndexedSlices of Buffers; new memory on ``home``."""
    parts: list[Buffer] = [term.values for term in placed]
    for place, part in enumerate(parts):
        if part.dtype != parts[0].dtype:
            raise TypeError(
                f"inputs have dtypes that don't all match: input 0 is {parts[0].dtype}, input "
                f"{place} is {part.dtype}"
            )
        if part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                "inputs must have rows of the same shape. Input 0: "
                f"{list(parts[0].shape[1:])} != input {place}: {list(part.shape[1:])}"
            )
    indices = ops.joined_indices([term.indices for term in placed])
    check_indices(indices, placed[0].dense_shape)
    (whole,) = rows_together([(home, parts)])
    return IndexedSlices.of(whole, indices, placed[0].dense_shape)


def rows_together(groups: Sequence[tuple[Device, Sequence[Buffer]]]) -> list[Buffer]:
    """For each group new memory on its device that holds its rows, one Buffer behind the other.

    One launch on each device copies all that it reaches. What it does not reach comes in one copy
    from each other device, packed there if it is several.

    Args:
        groups: where to, and Buffers with rows of one shape and dtype, at least one.
    """
    wholes, near, far = [], dict[Device, list[_Move]](), dict[tuple[Device, Device], list[_Move]]()
    for home, parts in groups:
        num_rows = sum(part.shape[0] for part in parts)
        whole = home.empty((num_rows, *parts[0].shape[1:]), parts[0].dtype)
        wholes.append(whole)
        start = 0
        for part in parts:
            move = (whole.view(start, part.shape), part)
            start += part.size
            if reaches(home, part):
                near.setdefault(home, []).append(move)
            else:
                far.setdefault((home, part.device), []).append(move)
    for (home, _), moves in far.items():
        if len(moves) == 1:
            copy_over(home, *moves[0])
        else:
            near.setdefault(home, []).extend(_arrived(home, moves))
    for home, moves in near.items():
        _pack(home, moves)
    return wholes


def _arrived(home: Device, moves: Sequence[_Move]) -> list[_Move]:
    """The same rows on ``home``, by way of two flat buffers; all come from one device."""
    source = moves[0][1].device
    flats: dict[DType, list[_Move]] = {}
    for move in moves:
        flats.setdefault(move[1].dtype, []).append(move)
    arrived, packed = list[_Move](), list[_Move]()
    for dtype, sharing in flats.items():
        layout = flat_layout([part.size for _, part in sharing], dtype.itemsize)
        there, here = (device.empty((layout.size,), dtype) for device in (source, home))
        for (into, part), offset in zip(sharing, layout.offsets, strict=True):
            packed.append((there.view(offset, part.shape), part))
            arrived.append((into, here.view(offset, part.shape)))
        _pack(source, packed)
        copy_over(home, here, there)
        packed = []
    return arrived


def _pack(device: Device, moves: Sequence[_Move]) -> None:
    """One launch by ``device``, which reaches all of it."""
    others = [part.device for _, part in moves]
    gather(device, others)
    ops.pack([into for into, _ in moves], [part for _, part in moves], device=device)
    scatter(device, others)
