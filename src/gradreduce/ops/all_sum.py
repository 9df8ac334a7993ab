"""Writes the sum of replicas to every output: launcher of ``all_sum.cu``, NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
from .templates import FLOATS, FROM_ACC, SAME

# For these numbers of float inputs the count is a template argument, so that all loads are in
# flight together.
UNROLLED = (1, 2, 4, 8)


def _all_sum_reference(
    table: Sequence[Arrays], num_outs: int, num_inputs: int, split: int, divisor: float
) -> None:
    """``(in[0] + … + in[split-1]) + (in[split] + …)``, divided, into every out."""
    first = split or num_inputs
    acc_dtype = accumulate_dtype(table[0][num_outs].dtype)
    over = np.asarray(divisor, acc_dtype)  # a 0-d array: a scalar takes twice as long
    for row in table:
        outs, inputs = row[:num_outs], row[num_outs:]
        late = inputs[split:] if split else ()
        total = add_left_to_right(inputs[:first], acc_dtype, outs[0], late)
        if split:
            rest = add_left_to_right(inputs[split:], acc_dtype)
            total = np.add(total, rest, None if split == 1 else total)
        if divisor != 1:
            holder = outs[0] if num_inputs == 1 else total  # an input is not written
            holds = holder.dtype == acc_dtype
            total = np.true_divide(total, over, holder if holds else None, dtype=acc_dtype)
        for out in outs:
            if out is not total:
                out[...] = total


ALL_SUM = Kernel(
    name="all_sum",
    source="all_sum",
    reference=_all_sum_reference,
    scalars=(
        ("num_outs", "int64"),
        ("num_inputs", "int64"),
        ("split", "int64"),
        ("divisor", "float64"),
    ),
    templates=tuple(
        (*pair, count)
        for pair in (*SAME, *FROM_ACC)
        for count in (0, *(UNROLLED if pair[1] in FLOATS else ()))
    ),
    writes="num_outs",
    streams=True,
)


def all_sum(
    outs: Sequence[Sequence[Buffer]],
    inputs: Sequence[Sequence[Buffer]],
    split: int = 0,
    *,
    divisor: float = 1,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """Sets every ``outs[t][j]`` to ``((in[0] + … + in[split-1]) + (in[split] + …)) / divisor``.

    Reads each input once and writes each output once: an all-reduce of replicas that one device can
    access. One launch for all tensors with the same dtypes and numbers of outputs and inputs.

    Args:
        outs: at least one for each tensor t; overwritten. Each may be an input, but not
            overlap one partly.
        inputs: at least one for each tensor; all of one dtype.
        split: the number of inputs in the first group; 0 adds all left to right.
        divisor: divides the sum in the accumulate dtype, before the only rounding; 1: no division.
        device: the device that launches; default: that of ``outs[0][0]``. Adds no stream waits.
        queue: the queue to launch on.

    The operands are not validated.
    """
    rows: dict[int, list[Row]] = {}
    for written, read in zip(outs, inputs, strict=True):
        rows.setdefault(len(written), []).append((*written, *read))
    for num_outs, found in rows.items():
        for (to, of, num_operands), table in by_template(same_dtypes(found)).items():
            num_inputs = num_operands - num_outs
            scalars = (num_outs, num_inputs, split, float(divisor))
            unrolled = num_inputs if num_inputs in UNROLLED and of in FLOATS else 0
            at = device or table[0][0].device
            at.launch(ALL_SUM, (to, of, unrolled), table, scalars, queue=queue)
