"""Writes the sum of replicas to every output: launcher of ``all_sum.cu``, NumPy reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel, Queue, Template, accumulate_dtype, element_of
from gradreduce.device.buffer import Row
from gradreduce.device.dtypes import ELEMENT_OF
from gradreduce.device.kernel import Arrays

from .validate import FLOATS, FROM_ACC, SAME, as_elements, by_dtype, check_divisor

# For these numbers of inputs, of floats, the count is a template argument: all loads are in flight
# together.
UNROLLED = (1, 2, 4, 8)
# From this many elements on, checking whether an output can hold the sum is cheaper than a copy.
LARGE = 1 << 12


def _all_sum_reference(
    table: Sequence[Arrays], num_outs: int, num_inputs: int, split: int, divisor: float
) -> None:
    """``(in[0] + … + in[split-1]) + (in[split] + …)``, divided, into every out."""
    first = split or num_inputs
    acc_dtype = accumulate_dtype(table[0][num_outs].dtype)
    over = np.asarray(divisor, acc_dtype)  # a zero-dimensional array: a scalar takes twice as long
    largest = max(row[0].size for row in table)
    scratch = np.empty(2 * largest, acc_dtype)
    ready = -1
    for row in table:
        outs, inputs = row[:num_outs], row[num_outs:]
        size = outs[0].size
        if size != ready:  # tiny tensors often have one size, and a view takes as long as a sum
            ready, room, rest = size, scratch[:size], scratch[largest : largest + size]
        holds = size >= LARGE and _may_hold(outs[0], inputs[min(first, 2) :], acc_dtype)
        total = outs[0] if holds else room
        if num_inputs > 1 or divisor == 1:
            _left_to_right(total, inputs[:first])
        if split:
            _left_to_right(rest, inputs[split:])
            np.add(total, rest, total)
        if divisor != 1:  # of one input without a pass that copies it first
            np.true_divide(total if num_inputs > 1 else inputs[0], over, total, dtype=acc_dtype)
        for out in outs:
            if out is not total:
                out[...] = total


def _may_hold(out: np.ndarray, late: Arrays, acc_dtype: np.dtype) -> bool:
    """Whether an output can hold the running sum: not if it is a term read later."""
    return out.dtype == acc_dtype and not any(np.may_share_memory(out, term) for term in late)


def _left_to_right(total: np.ndarray, terms: Arrays) -> None:
    """Writes the sum; the first two terms are read before anything is written."""
    if len(terms) == 1:
        total[...] = terms[0]
        return
    np.add(terms[0], terms[1], total, dtype=total.dtype)
    for term in terms[2:]:
        np.add(total, term, total, dtype=total.dtype)


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


def _template(out: str, term: str, num_inputs: int) -> Template:
    unrolled = num_inputs in UNROLLED and term in FLOATS
    return (out, term, num_inputs if unrolled else 0)


def all_sum(
    outs: Sequence[Sequence[Buffer]],
    inputs: Sequence[Sequence[Buffer]],
    split: int = 0,
    *,
    divisor: float = 1,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """Every ``outs[t][j]`` becomes ``(in[0] + … + in[split-1]) + (in[split] + … ) / divisor``.

    (The division is of the whole sum.) Reads each input once and writes each output once: an
    all-reduce of replicas that are accessible to one device. One launch for all tensors with the
    same dtypes and numbers of outputs and inputs.

    Args:
        outs: for each tensor t at least one; overwritten. Each may be an input exactly.
        inputs: for each tensor at least one; all of one dtype.
        split: number of inputs in the first group; 0 adds all left to right.
        divisor: of the sum, in the accumulate dtype, before the one rounding; 1 means no division.
        device: launches on its queue; default that of ``outs[0][0]``. Adds no stream waits.
        queue: the queue to launch on.

    Raises:
        ValueError: sizes or dtypes do not match, an output partly overlaps an input, ``split``
            leaves a group empty, or integers would be divided.
    """
    for terms in inputs:
        check_divisor("all_sum", divisor, terms)
        if split and not 0 < split < len(terms):
            raise ValueError(
                f"all_sum: split={split} must be between 0 and {len(terms)}, the inputs"
            )
    rows = zip(outs, inputs, strict=True)
    for (to, of, num_outs, num_inputs), operands in by_dtype(ALL_SUM, rows).items():
        device = device or outs[0][0].device
        scalars = (num_outs, num_inputs, split, float(divisor))
        template = _template(to, of, num_inputs)
        device.launch(ALL_SUM, template, operands, scalars, queue=queue)


def all_sum_unchecked(
    outs: Sequence[Row],
    inputs: Sequence[Row],
    split: int = 0,
    *,
    divisor: float,
    device: Device,
    queue: Queue,
) -> None:
    """As ``all_sum`` without validation, for buffers that were created to match."""
    launches: dict[tuple[int, int], list[Row]] = {}
    for written, read in zip(outs, inputs, strict=True):
        key = (id(written[0].dtype), id(read[0].dtype))
        launches.setdefault(key, []).append((*written, *read))
    num_inputs = len(inputs[0])
    scalars = (len(outs[0]), num_inputs, split, float(divisor))
    merged: dict[Template, list[Row]] = {}  # several dtypes share a template
    for rows in launches.values():
        out, term = ELEMENT_OF[rows[0][0].dtype], ELEMENT_OF[rows[0][-1].dtype]
        if out.viewed is not None:
            rows = [as_elements(row) for row in rows]
        merged.setdefault(_template(out.name, term.name, num_inputs), []).extend(rows)
    for template, rows in merged.items():
        device.launch(ALL_SUM, template, rows, scalars, queue=queue)


def prepare_all_sum(
    device: Device, out: np.dtype, term: np.dtype, counts: Iterable[int] = (1,)
) -> None:
    """Compiles the kernels of ``all_sum`` for these dtypes and numbers of inputs."""
    to, of = element_of(out).name, element_of(term).name
    for template in dict.fromkeys(_template(to, of, count) for count in counts):
        device.prepare(ALL_SUM, template)
