"""Copies tensors into a flat buffer and back: launcher of ``pack.cu``, NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel, Template, accumulate_dtype, element_of
from gradreduce.device.buffer import Row
from gradreduce.device.dtypes import ELEMENT_OF
from gradreduce.device.kernel import Arrays

from .validate import CASTS, SAME, as_elements, check_divisor, paired


def _pack_reference(table: Sequence[Arrays], divisor: float) -> None:
    """``out = in / divisor``, and zeros after the end of ``in``."""
    for out, term in table:
        filled = out if out.size == term.size else out[: term.size]
        if divisor != 1:
            acc_dtype = accumulate_dtype(term.dtype)
            term = np.true_divide(term, acc_dtype.type(divisor), dtype=acc_dtype)
        if filled.itemsize == 2 and term.itemsize == 8 and term.dtype.kind == "f":
            term = term.astype(
                np.float32
            )  # like the kernel, which has no conversion from double to half
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
    """``outs[t] = inputs[t] / divisor`` for every tensor t, cast to the out's dtype.

    One launch for all tensors with the same dtypes.

    Args:
        outs: one per tensor, usually in a flat buffer; overwritten. One that is longer than its
            input is filled up with zeros.
        inputs: one per tensor.
        divisor: in the accumulate dtype of the input; 1 means no division.
        device: launches on its compute queue; default that of ``outs[0]``. Adds no stream waits.

    Raises:
        ValueError: an output is shorter than its input, partly overlaps it, or integers would be
            divided.
    """
    check_divisor("pack", divisor, inputs)
    for (to, of, _, _), operands in paired(PACK, outs, inputs).items():
        device = device or outs[0].device
        device.launch(PACK, (to, of), operands, (float(divisor),))


def pack_unchecked(
    moves: Sequence[tuple[Sequence[Buffer], Sequence[Buffer]]], *, divisor: float, device: Device
) -> None:
    """As ``pack`` without validation: ``outs`` and ``inputs`` that were created to match.

    Validation took a tenth of the host time of a reduction of many small tensors.

    Args:
        moves: outs of one dtype, and their inputs, of one dtype too.
        divisor: see ``pack``.
        device: see ``pack``.
    """
    launches: dict[tuple[int, int], list[Row]] = {}
    for outs, inputs in moves:
        if outs:
            key = (id(outs[0].dtype), id(inputs[0].dtype))  # hashing a dtype is slow
            launches.setdefault(key, []).extend(zip(outs, inputs, strict=True))
    merged: dict[Template, list[Row]] = {}  # several dtypes share a template
    for rows in launches.values():
        to, of = ELEMENT_OF[rows[0][0].dtype], ELEMENT_OF[rows[0][1].dtype]
        if to.viewed is not None:
            rows = [as_elements(row) for row in rows]
        merged.setdefault((to.name, of.name), []).extend(rows)
    for template, rows in merged.items():
        device.launch(PACK, template, rows, (float(divisor),))


def prepare_pack(device: Device, out: np.dtype, term: np.dtype) -> None:
    """Compiles the kernel of ``pack`` for these dtypes."""
    device.prepare(PACK, (element_of(out).name, element_of(term).name))
