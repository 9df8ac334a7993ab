"""Sums of all terms of a gradient as real numbers, on the device of the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce import ops
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.device import Buffer, ensure_accessible

from .aggregators import AddN, MultiDeviceSum, round_to, scaled
from .term_weights import check_whole


def check_exact_term(term: Any) -> None:
    """Raises ``ValueError`` or ``TypeError`` for a term that cannot be added exactly.

    Args:
        term: an array of any library, a Buffer, IndexedSlices, or a list.
    """
    if isinstance(term, IndexedSlices):
        raise ValueError("exact=True does not support IndexedSlices: pass .to_dense()")
    check_exact_dtype(getattr(term, "dtype", ""))  # a list has none yet


def check_exact_dtype(dtype: Any) -> None:
    """Raises ``TypeError`` for a dtype of any library whose sums cannot be exact."""
    name = str(dtype).removeprefix("torch.")
    if name in ("float64", "complex128"):
        raise TypeError(
            f"exact=True does not support {name} yet: pass terms of a narrower dtype, or "
            "exact=False"
        )


def check_exact_terms(terms: Sequence[Buffer], weights: Sequence[float]) -> None:
    """Raises unless all terms have one shape and dtype, and integers have whole weights."""
    like = MultiDeviceSum(AddN)
    for term in terms:
        check_exact_term(term)
        like.check(term.shape, term.dtype)
    for weight in weights:
        check_whole(weight, terms[0].dtype)


def add_exactly(terms: Sequence[Buffer], weights: Sequence[float]) -> Buffer:
    """Returns the sum of the terms, rounded once, in new memory on the device of the first one.

    Terms that this device cannot read are copied to it.

    Args:
        terms: at least one, or two without weights; checked.
        weights: one for each term, or none; products are rounded to the accumulate dtype.
    """
    shape, dtype, home = terms[0].shape, terms[0].dtype, terms[0].device
    if weights:
        terms = [scaled(term, weight) for term, weight in zip(terms, weights, strict=True)]
    if len(terms) == 1:
        return round_to(terms[0], dtype)
    read = [ensure_accessible(home, term) for term in terms]
    total = home.empty(shape, dtype)
    ops.exact_sum([[total]], [read], device=home)
    return total
