"""Scales tensors down to a norm: launcher of ``clip.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import (
    Arrays,
    Buffer,
    Device,
    Kernel,
    accumulate_dtype,
    by_template,
    same_dtypes,
)

from .templates import FLOATS


def _clip_reference(table: Sequence[Arrays], limit: float) -> None:
    """``out = in * factor``, with ``factor = limit * min(1 / norm, 1 / limit)``."""
    for out, source, norm in table:
        most, least = np.float64(1) / np.float64(limit), np.float64(1) / norm[0]
        factor = np.float64(limit) * (least if least < most else most) + (norm[0] - norm[0])
        acc_dtype = accumulate_dtype(source.dtype)
        out[...] = np.multiply(source, acc_dtype.type(factor), dtype=acc_dtype)


CLIP = Kernel(
    name="clip",
    source="clip",
    reference=_clip_reference,
    scalars=(("limit", "float64"),),
    templates=tuple((element,) for element in FLOATS),
    items=lambda sizes: sizes[0],
)


def clip(
    outs: Sequence[Buffer],
    inputs: Sequence[Buffer],
    norm: Buffer,
    *,
    limit: float,
    device: Device | None = None,
) -> None:
    """``outs[t] = inputs[t] * limit * min(1 / norm, 1 / limit)`` for every tensor t.

    One launch for all tensors of the same dtype.

    Args:
        outs: one per tensor; overwritten. May be its input exactly.
        inputs: floats, one per tensor.
        norm: float64, one element; if it is infinite or NaN, every output is NaN.
        limit: above 0.
        device: launches on its compute queue; default that of ``outs[0]``. Adds no stream waits.

    The operands are not validated.
    """
    table = [(out, source, norm) for out, source in zip(outs, inputs, strict=True)]
    for (name, _, _), rows in by_template(same_dtypes(table)).items():
        (device or outs[0].device).launch(CLIP, (name,), rows, (float(limit),))
