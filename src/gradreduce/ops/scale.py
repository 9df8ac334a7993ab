"""Multiplies terms by a weight: launcher of ``scale.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

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

from .templates import CASTS, FLOATS, SAME, TO_ACC

_LOW_BITS = np.uint64(0x7FFFFFF)  # the lower 27 of the 53 bits of a float64
# A product in float64 rounds wrongly to float32 only if it lies in the middle of two float32. Then
# its bits below those of a float32 are _HALF. Below _SMALLEST_NORMAL the middles are elsewhere.
_BELOW_FLOAT, _HALF = np.int64(0x1FFFFFFF), np.int64(0x10000000)
_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_BLOCK = 1 << 14  # elements, whose float64 malloc does not get from the system each time


def _scale_reference(table: Sequence[Arrays], weight: float, divisor: float) -> None:
    """``out = in * weight / divisor``, and zeros after the end of ``in``."""
    for out, term in table:
        filled = out if out.size == term.size else out[: term.size]
        product = _product(term, out.dtype, weight, filled)
        if divisor != 1:
            product = np.true_divide(product, product.dtype.type(divisor))
        if filled.itemsize == 2 and product.itemsize == 8 and product.dtype.kind == "f":
            # Like the kernel, which has no conversion from double to half.
            product = product.astype(np.float32)
        if product is not filled:
            filled[...] = product
        if filled is not out:
            out[filled.size :] = 0


def _add_scaled_reference(table: Sequence[Arrays], weight: float) -> None:
    """``total = total + in * weight``."""
    for total, term in table:
        total += _product(term, total.dtype, weight).astype(total.dtype, copy=False)


def _product(
    term: np.ndarray, out_dtype: np.dtype, weight: float, out: np.ndarray | None = None
) -> np.ndarray:
    """Returns ``term * weight``, rounded once to the wider of both accumulate dtypes.

    Args:
        term: the term.
        out_dtype: the dtype of the result or of the sum.
        weight: the weight.
        out: memory for the product, used if it has the dtype of the product.
    """
    dtypes = accumulate_dtype(out_dtype), accumulate_dtype(term.dtype)
    dtype = max(dtypes, key=attrgetter("itemsize"))
    term = term.astype(dtype, copy=False)
    with np.errstate(over="ignore"):
        factor = np.int64(int(weight)).astype(dtype) if dtype.kind in "iu" else dtype.type(weight)
    if dtype.kind in "iu" or dtype.itemsize == 8 or float(factor) == weight:
        into = out if out is not None and out.dtype == dtype else None
        product: np.ndarray = np.multiply(term, factor, out=into)
        return product
    product = np.empty(term.shape, np.float32)
    for start in range(0, term.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        product[block] = _product_rounded_once(term[block], np.float64(weight))
    return product


def _product_rounded_once(term: np.ndarray, weight: np.float64) -> np.ndarray:
    doubles = np.multiply(term, weight, dtype=np.float64)
    product: np.ndarray = doubles.astype(np.float32)
    twice = doubles.view(np.int64) & _BELOW_FLOAT == _HALF
    sizes = np.abs(product)
    if np.min(sizes, initial=np.inf) < _SMALLEST_NORMAL:
        twice |= (sizes < _SMALLEST_NORMAL) & (doubles != 0)
    if np.any(twice):
        product[twice] = _product_rounded_to_odd(term[twice], weight).astype(np.float32)
    return product


def _product_rounded_to_odd(term: np.ndarray, weight: np.float64) -> np.ndarray:
    """Returns products of float32 and float64 that another rounding rounds as if it were the first.

    Two parts of the weight have exact products. Their sum is rounded to an odd last bit unless it
    is exact, so that it is never in the middle between two float32.
    """
    high = (weight.view(np.uint64) & ~_LOW_BITS).view(np.float64)
    doubles = term.astype(np.float64)
    upper, lower = doubles * high, doubles * (weight - high)
    product = upper + lower
    from_lower = product - upper
    rest = (upper - (product - from_lower)) + (lower - from_lower)
    bits = product.view(np.int64)
    is_even = (rest != 0) & np.isfinite(rest) & (bits & 1 == 0)
    bits[is_even] += np.where((rest > 0) == (product > 0), 1, -1)[is_even]
    return product


SCALE = Kernel(
    name="scale",
    source="scale",
    reference=_scale_reference,
    scalars=(("weight", "float64"), ("divisor", "float64")),
    templates=(*SAME, *CASTS),
    streams=True,
)
ADD_SCALED = Kernel(
    name="add_scaled",
    source="scale",
    reference=_add_scaled_reference,
    scalars=(("weight", "float64"),),
    templates=(*[pair for pair in SAME if pair[0] not in FLOATS[:2]], *TO_ACC),
)


def scale_rows(
    groups: Sequence[Sequence[Row]], weight: float, *, divisor: float = 1, device: Device
) -> None:
    """Sets the first operand of each row to the second, times a weight; see ``pack_rows``.

    Args:
        groups: groups of rows ``(out, input)``; a group has equal dtypes. The rest of an output
            that is longer than its input becomes zero.
        weight: finite, and at least 0; for integers a whole number below 2**63.
        divisor: divides the product.
        device: launches on its compute queue.
    """
    for (to, of, _), rows in by_template(groups).items():
        device.launch(SCALE, (to, of), rows, (weight, float(divisor)))


def scale(
    outs: Sequence[Buffer],
    inputs: Sequence[Buffer],
    weight: float,
    *,
    divisor: float = 1,
    device: Device,
) -> None:
    """``outs[t] = inputs[t] * weight / divisor`` for every tensor t; see ``pack``."""
    rows = same_dtypes(zip(outs, inputs, strict=True))
    scale_rows(rows, weight, divisor=divisor, device=device)


def add_scaled(
    totals: Sequence[Buffer], inputs: Sequence[Buffer], weight: float, *, device: Device
) -> None:
    """``totals[t] += inputs[t] * weight`` for every tensor t.

    One launch for all tensors with the same dtypes.

    Args:
        totals: one per tensor, of a dtype in which sums are computed; overwritten.
        inputs: one per tensor, of the total's dtype or another float dtype.
        weight: see ``scale_rows``.
        device: launches on its compute queue.

    The operands are not validated.
    """
    groups = same_dtypes(zip(totals, inputs, strict=True))
    for (to, of, _), rows in by_template(groups).items():
        device.launch(ADD_SCALED, (to, of), rows, (weight,))
