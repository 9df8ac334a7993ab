"""What becomes of IndexedSlices among the terms of one gradient; never adds dense arrays.

All terms sparse: one IndexedSlices of all their rows, one term after the other; what has the same
index stays apart until ``coalesce()``. Some sparse: each of those is made dense, a term like any
other. Source: TensorFlow's aggregation of gradients and add_n, from 2.x on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from gradreduce import ops
from gradreduce.device import Buffer, Device, copy_over, gather, reaches, scatter
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

_Copy = tuple[Device, Buffer, Buffer]  # whose queue copies, into, from


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


def concatenated(terms: Sequence[IndexedSlices], kind: Kind) -> IndexedSlices:
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

    One launch on each device copies all that it reaches.

    Args:
        groups: where to, and Buffers with rows of one shape and dtype, at least one.
    """
    wholes, near, far = [], dict[Device, list[tuple[Buffer, Buffer]]](), list[_Copy]()
    for home, parts in groups:
        num_rows = sum(part.shape[0] for part in parts)
        whole = home.empty((num_rows, *parts[0].shape[1:]), parts[0].dtype)
        wholes.append(whole)
        start = 0
        for part in parts:
            view = whole.view(start, part.shape)
            start += part.size
            if reaches(home, part):
                near.setdefault(home, []).append((view, part))
            else:
                far.append((home, view, part))
    for home, pairs in near.items():
        others = [part.device for _, part in pairs]
        gather(home, others)
        ops.pack([view for view, _ in pairs], [part for _, part in pairs], device=home)
        scatter(home, others)
    for home, view, part in far:
        copy_over(home, view, part)
    return wholes
