"""Adds terms to a sum in place: launcher of ``accumulate_n.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel, Queue, accumulate_dtype, element_of
from gradreduce.device.kernel import Arrays

from .validate import SAME, TO_ACC, by_dtype, paired


def _accumulate_n_reference(table: Sequence[Arrays], num_inputs: int) -> None:
    """``total = total + in[0] + in[1] + …``, left to right, in the accumulate dtype of total."""
    for total, *inputs in table:
        acc_dtype = accumulate_dtype(total.dtype)
        # From the second addition on, an input that is the total must have its old value.
        late = any(np.may_share_memory(total, term) for term in inputs[1:])
        in_place = total.dtype == acc_dtype and not late
        running = total if in_place else total.astype(acc_dtype)
        for term in inputs:
            # Cast first: float64 terms of a float32 sum are rounded before they are added.
            np.add(running, term.astype(acc_dtype, copy=False), out=running)
        if running is not total:
            total[...] = running


ACCUMULATE_N = Kernel(
    name="accumulate_n",
    source="accumulate_n",
    reference=_accumulate_n_reference,
    scalars=(("num_inputs", "int64"),),
    templates=(*SAME, *TO_ACC),
    streams=True,
)


def accumulate_n(
    totals: Sequence[Buffer],
    inputs: Sequence[Sequence[Buffer]],
    *,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``totals[t] += inputs[t][0] + inputs[t][1] + …`` for every tensor t, left to right.

    One launch for all tensors with the same dtypes and number of inputs.

    Args:
        totals: one per tensor; overwritten. May be one of its inputs exactly.
        inputs: for each tensor at least one term of its size; all terms of one dtype, which is
            the total's or a float that is cast to it.
        device: launches on its queue; default that of ``totals[0]``. Adds no stream waits.
        queue: the queue to launch on.

    Raises:
        ValueError: sizes or dtypes do not match, or a total partly overlaps an input.
    """
    rows = zip(zip(totals), inputs, strict=True)
    for (to, of, _, num_inputs), operands in by_dtype(ACCUMULATE_N, rows).items():
        device = device or totals[0].device
        device.launch(ACCUMULATE_N, (to, of), operands, (num_inputs,), queue=queue)


def accumulate_unchecked(
    totals: Sequence[Buffer], inputs: Sequence[Buffer], *, device: Device
) -> None:
    """``totals[t] += inputs[t]`` without validation; see ``pack_unchecked``."""
    for (to, of, _, _), operands in paired(ACCUMULATE_N, totals, inputs, fitted=True).items():
        device.launch(ACCUMULATE_N, (to, of), operands, (1,))


def prepare_accumulate_n(device: Device, total: np.dtype, term: np.dtype) -> None:
    """Compiles the kernel of ``accumulate_n`` for these dtypes."""
    device.prepare(ACCUMULATE_N, (element_of(total).name, element_of(term).name))
