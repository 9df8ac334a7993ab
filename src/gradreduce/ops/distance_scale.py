"""Scales sums by how far the center moved: ``distance_scale.cu``, NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Arrays, Buffer, Device, Kernel, by_template, same_dtypes

from .templates import FLOATS


def _distance_scale_reference(table: Sequence[Arrays], gamma: float) -> None:
    """``out = sum / ((center - pulled)² / gamma + 1)``."""
    for out, total, center, pulled in table:
        acc_dtype = out.dtype
        away = np.subtract(center, pulled, dtype=acc_dtype)
        np.multiply(away, away, out=away)
        np.true_divide(away, acc_dtype.type(gamma), out=away)
        np.add(away, acc_dtype.type(1), out=away)
        np.true_divide(total, away, out=out)


DISTANCE_SCALE = Kernel(
    name="distance_scale",
    source="distance_scale",
    reference=_distance_scale_reference,
    scalars=(("gamma", "float64"),),
    templates=tuple((name,) for name in FLOATS),
)


def distance_scale(
    outs: Sequence[Buffer],
    sums: Sequence[Buffer],
    centers: Sequence[Buffer],
    pulled: Sequence[Buffer],
    *,
    gamma: float,
    device: Device | None = None,
) -> None:
    """``outs[t] = sums[t] / ((centers[t] - pulled[t])**2 / gamma + 1)`` for every tensor t.

    One launch for all tensors of the same dtype.

    Args:
        outs: one per tensor, of its size, in the accumulate dtype; overwritten. May be exactly its
            sum.
        sums: one per tensor, of the same dtype.
        centers: one per tensor, of a float dtype.
        pulled: one per tensor, of the same dtype: the center as it was pulled.
        gamma: the squared distance that halves a sum; above 0.
        device: launches on its compute queue; default that of ``outs[0]``. Adds no stream waits.

    The operands are not validated.
    """
    table = zip(outs, sums, centers, pulled, strict=True)
    for (_, name, _), rows in by_template(same_dtypes(table)).items():
        (device or outs[0].device).launch(DISTANCE_SCALE, (name,), rows, (float(gamma),))
