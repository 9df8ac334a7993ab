"""Adds terms to a sum in place: launcher of ``accumulate_n.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import (
    Arrays,
    Buffer,
    Device,
    Kernel,
    Queue,
    Row,
    accumulate_dtype,
    by_template,
    same_dtypes,
)

from .running_sum import add_left_to_right
from .templates import SAME, TO_ACC


def _accumulate_n_reference(table: Sequence[Arrays], num_inputs: int) -> None:
    """``total = total + in[0] + in[1] + …``, left to right, in the accumulate dtype of total."""
    for total, *inputs in table:
        acc_dtype = accumulate_dtype(total.dtype)
        if inputs[0].itemsize > acc_dtype.itemsize:  # float64 terms are rounded before the addition
            inputs = [term.astype(acc_dtype) for term in inputs]
        running = add_left_to_right([total, *inputs], acc_dtype, total)
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
        totals: one per tensor; overwritten. May be one of its inputs, but not overlap one partly.
        inputs: for each tensor at least one term of its size; all terms of one dtype, which is the
            total's or a float dtype that is cast to it.
        device: the device that launches; default: that of ``totals[0]``. Adds no stream waits.
        queue: the queue to launch on.

    The operands are not validated.
    """
    table = [(total, *terms) for total, terms in zip(totals, inputs, strict=True)]
    for (to, of, num_operands), rows in by_template(same_dtypes(table)).items():
        device = device or totals[0].device
        device.launch(ACCUMULATE_N, (to, of), rows, (num_operands - 1,), queue=queue)


def add_to_rows(rows: Sequence[Row], device: Device) -> None:
    """Adds the second operand of each row to the first; see ``accumulate_n``."""
    accumulate_n([total for total, _ in rows], [[term] for _, term in rows], device=device)
