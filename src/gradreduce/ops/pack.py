"""Copies tensors into a flat buffer and back: launcher of ``pack.cu``, NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import (
    Arrays,
    Buffer,
    Device,
    Kernel,
    Row,
    accumulate_dtype,
    by_template,
    same_dtypes,
)

from .templates import CASTS, SAME


def _pack_reference(table: Sequence[Arrays], divisor: float) -> None:
    """``out = in / divisor``, and zeros after the end of ``in``."""
    for out, term in table:
        filled = out if out.size == term.size else out[: term.size]
        if divisor != 1:
            acc_dtype = accumulate_dtype(term.dtype)
            term = np.true_divide(term, acc_dtype.type(divisor), dtype=acc_dtype)
        if filled.itemsize == 2 and term.itemsize == 8 and term.dtype.kind == "f":
            # Like the kernel, which has no conversion from double to half.
            term = term.astype(np.float32)
        filled[...] = term
        if filled is not out:
            out[filled.size :] = 0


PACK = Kernel(
    name="pack",
    source="pack",
    reference=_pack_reference,
    scalars=(("divisor", "float64"),),
    templates=(*SAME, *CASTS),
)


def pack(
    outs: Sequence[Buffer],
    inputs: Sequence[Buffer],
    *,
    divisor: float = 1,
    device: Device | None = None,
) -> None:
    """``outs[t] = inputs[t] / divisor`` for every tensor t, cast to the output's dtype.

    One launch for all tensors with the same dtypes.

    Args:
        outs: one per tensor, usually in a flat buffer; overwritten. The rest of an output that is
            longer than its input becomes zero.
        inputs: one per tensor.
        divisor: divides in the accumulate dtype of the input; 1: no division.
        device: launches on its compute queue; default that of ``outs[0]``. Adds no stream waits.

    The operands are not validated.
    """
    if groups := same_dtypes(zip(outs, inputs, strict=True)):
        pack_rows(groups, divisor=divisor, device=device or outs[0].device)


def pack_rows(groups: Sequence[Sequence[Row]], *, divisor: float = 1, device: Device) -> None:
    """Like ``pack``, for groups of rows ``(out, input)``; a group has equal dtypes."""
    for (to, of, _), rows in by_template(groups).items():
        device.launch(PACK, (to, of), rows, (float(divisor),))


def pack_to_rows(rows: Sequence[Row], device: Device) -> None:
    """Copies the second operand of each row to the first; see ``pack``."""
    pack([out for out, _ in rows], [value for _, value in rows], device=device)
