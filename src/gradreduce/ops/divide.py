"""Divides sums of integers: launcher of ``divide.cu`` and NumPy reference.

Floats are divided in the pass of their last addition, or by ``pack``; integers are added modulo
2**bits in their own dtype, and only the final sum is converted to a float.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Arrays, Buffer, Device, Kernel, group_by

from .templates import MEAN


def _divide_reference(table: Sequence[Arrays], divisor: float) -> None:
    """``out = in / divisor``, in the dtype of the output."""
    for out, term in table:
        np.true_divide(term, out.dtype.type(divisor), out=out, dtype=out.dtype)


DIVIDE = Kernel(
    name="divide",
    source="divide",
    reference=_divide_reference,
    scalars=(("divisor", "float64"),),
    templates=MEAN,
)


def divide(
    outs: Sequence[Buffer],
    inputs: Sequence[Buffer],
    divisor: float,
    *,
    device: Device | None = None,
) -> None:
    """``outs[t] = inputs[t] / divisor`` for every tensor t of integers: true division.

    One launch for all tensors of the same dtypes.

    Args:
        outs: one per tensor, of its size and of ``mean_dtype`` of its dtype; overwritten. With 64
            bits it may be exactly its input.
        inputs: one per tensor, of any integer dtype; only read.
        divisor: rounded to the output's dtype; 0, infinities and NaN as in IEEE 754.
        device: launches on its compute queue; default that of ``outs[0]``. Adds no stream waits.

    The operands are not validated.
    """
    pairs = list(zip(outs, inputs, strict=True))
    keys = [(out.dtype.name, term.dtype.name) for out, term in pairs]
    for template, rows in group_by(zip(keys, pairs, strict=True)).items():
        (device or outs[0].device).launch(DIVIDE, template, rows, (float(divisor),))
