"""The running sum of NumPy references: adds arrays left to right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device.kernel import Arrays

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
        terms: at least one; a single one is returned itself, if it has this dtype.
        acc_dtype: of the sum.
        out: holds the sum, if it has this dtype and no term that is read after the first addition.
        late: what the caller reads after the sum is made.
    """
    if len(terms) == 1:
        return terms[0].astype(acc_dtype, copy=False)
    if out is not None and out.dtype != acc_dtype:
        out = None
    if out is not None and (len(terms) > 2 or late):
        read = (*terms[2:], *late)
        if out.size < LARGE or any(np.may_share_memory(out, term) for term in read):
            out = None
    total: np.ndarray = np.add(terms[0], terms[1], out, dtype=acc_dtype)
    for term in terms[2:]:
        total += term
    return total
