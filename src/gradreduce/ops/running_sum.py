"""The running sum of NumPy references: adds arrays left to right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Arrays

# From this many elements on, checking whether an output can hold the sum is cheaper than a copy.
LARGE = 1 << 12


def add_left_to_right(
    terms: Arrays,
    acc_dtype: np.dtype,
    out: np.ndarray | None = None,
    late: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """Returns ``terms[0] + terms[1] + …``, added in ``acc_dtype``.

    Args:
        terms: at least one; a single term of this dtype is returned itself.
        acc_dtype: the dtype of the sum.
        out: memory for the sum, used if it has this dtype and overlaps no term that is read after
            the first addition.
        late: arrays that the caller reads after the sum is made.
    """
    if len(terms) == 1:
        return terms[0].astype(acc_dtype, copy=False)
    if out is not None and not _can_hold(out, acc_dtype, terms[2:], late):
        out = None
    total: np.ndarray = np.add(terms[0], terms[1], out, dtype=acc_dtype)
    for term in terms[2:]:
        total += term
    return total


def _can_hold(
    out: np.ndarray, acc_dtype: np.dtype, rest: Arrays, late: Sequence[np.ndarray]
) -> bool:
    """Whether an output can hold a running sum while these arrays are still needed."""
    if out.dtype != acc_dtype:
        return False
    if not rest and not late:
        return True
    return out.size >= LARGE and not any(np.may_share_memory(out, each) for each in (*rest, *late))
