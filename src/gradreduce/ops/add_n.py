"""Sums arrays in one pass: launcher of ``add_n.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradreduce.device import (
    ELEMENT_OF,
    Arrays,
    Buffer,
    Device,
    Kernel,
    Queue,
    Template,
    accumulate_dtype,
    as_elements,
    by_template,
    same_dtypes,
)

from .running_sum import add_left_to_right
from .templates import SAME, TO_ACC

# Up to this many inputs the count is a template argument, so that all loads are in flight together.
UNROLLED = 8
SMALL = 4096  # elements; adding twice as many takes as long as making a Buffer


def _add_n_reference(table: Sequence[Arrays], num_inputs: int) -> None:
    """``out = in[0] + in[1] + …``, left to right, in the accumulate dtype of the inputs."""
    for out, *inputs in table:
        if num_inputs == 1:
            out[...] = inputs[0]
            continue
        total = add_left_to_right(inputs, accumulate_dtype(inputs[0].dtype), out)
        if total is not out:
            out[...] = total


ADD_N = Kernel(
    name="add_n",
    source="add_n",
    reference=_add_n_reference,
    scalars=(("num_inputs", "int64"),),
    templates=tuple(
        (*pair, count)
        for pairs, counts in ((SAME, range(UNROLLED + 1)), (TO_ACC, range(2)))
        for pair in pairs
        for count in counts
    ),
    streams=True,
)


def _template(out: str, term: str, num_inputs: int) -> Template:
    unrolled = num_inputs <= (UNROLLED if out == term else 1)
    return (out, term, num_inputs if unrolled else 0)


def add_n(
    outs: Sequence[Buffer],
    inputs: Sequence[Sequence[Buffer]],
    *,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``outs[t] = inputs[t][0] + inputs[t][1] + …`` for every tensor t, left to right.

    One launch for all tensors with the same dtypes and number of inputs. 16-bit floats are
    added in float32 and rounded once. With a single input this is a copy, or a cast.

    Args:
        outs: one per tensor; overwritten. May be one of its inputs, but not overlap one partly.
        inputs: for each tensor at least one term of its size; all terms of one dtype, which is the
            output's, or one whose accumulate dtype is the output's.
        device: the device that launches; default: that of ``outs[0]``. Adds no stream waits.
        queue: the queue to launch on.

    The operands are not validated.
    """
    table = [(out, *terms) for out, terms in zip(outs, inputs, strict=True)]
    for (to, of, num_operands), rows in by_template(same_dtypes(table)).items():
        device, num_inputs = device or outs[0].device, num_operands - 1
        device.launch(ADD_N, _template(to, of, num_inputs), rows, (num_inputs,), queue=queue)


def add_into_new(terms: Sequence[Buffer], dtype: np.dtype) -> Buffer:
    """Returns the sum of ``terms``, left to right, in a new Buffer on their device.

    Like ``add_n``, in less host time.

    Args:
        terms: at least one Buffer; all of one size and dtype, on one device.
        dtype: the dtype of the sum: that of the terms, or their accumulate dtype.
    """
    first = terms[0]
    device = first.device
    out = device.allocate(first.shape, dtype)
    row = [out, *terms]
    to, of = ELEMENT_OF[dtype], ELEMENT_OF[first.dtype]
    if to.viewed is not None:
        row = as_elements(row)
    device.launch_into_new(ADD_N, _template(to.name, of.name, len(terms)), row, (len(terms),))
    return out


def add_on_host(terms: Sequence[Any], device: Callable[[], Device]) -> Any:
    """Sums small NumPy arrays on the host, left to right; returns None if it cannot.

    Returns None if the device does not compute on the host, there are fewer than two terms, or a
    term is not a NumPy array, has more than ``SMALL`` elements, differs in shape or dtype from the
    others, or is not contiguous and aligned. The caller then validates the terms and calls
    ``add_into_new``.

    Args:
        terms: any objects.
        device: returns the device that records the launch.
    """
    if len(terms) < 2 or type(terms[0]) is not np.ndarray:
        return None
    shape, dtype = terms[0].shape, terms[0].dtype
    for term in terms:
        if type(term) is not np.ndarray or term.dtype is not dtype or term.shape != shape:
            return None
        flags = term.flags
        if not (flags.c_contiguous and flags.aligned and 0 < term.size <= SMALL):
            return None
    if dtype not in ELEMENT_OF:
        return None
    out = np.empty(shape, dtype)
    row = [out, *terms]
    if out.ndim != 1:
        row = [array.reshape(-1) for array in row]
    viewed = ELEMENT_OF[dtype].viewed
    if viewed is not None:
        row = [array.view(viewed) for array in row]
    return out if device().run_on_host(ADD_N, row, (len(terms),)) else None
