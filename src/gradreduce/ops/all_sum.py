"""How replicas become their sum, everywhere at once: ``kernels/all_sum.cu`` and its twin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel, Queue, accumulate_dtype, element_of
from gradreduce.device.kernel import Arrays

from .validate import FROM_WIDE, SAME, by_dtype, check_divisor

__all__ = ["ALL_SUM", "all_sum", "prepare_all_sum"]


# Elements from which on a look whether an out may hold the sum costs less than one more copy.
LARGE = 1 << 12


def _all_sum_reference(
    table: Sequence[Arrays], num_outs: int, num_inputs: int, split: int, divisor: float
) -> None:
    """``(in[0] + … + in[split-1]) + (in[split] + …)``, divided, into every out."""
    first = split or num_inputs
    wide = accumulate_dtype(table[0][num_outs].dtype)
    over = np.asarray(divisor, wide)  # an array of no dimension: a scalar takes twice as long
    largest = max(row[0].size for row in table)
    scratch = np.empty(2 * largest, wide)
    ready = -1
    for row in table:
        outs, inputs = row[:num_outs], row[num_outs:]
        size = outs[0].size
        if size != ready:  # as a rule tiny tensors are alike, and a view takes as long as a sum
            ready, room, rest = size, scratch[:size], scratch[largest : largest + size]
        holds = size >= LARGE and _may_hold(outs[0], inputs[min(first, 2) :], wide)
        total = outs[0] if holds else room
        if num_inputs > 1 or divisor == 1:
            _left_to_right(total, inputs[:first])
        if split:
            _left_to_right(rest, inputs[split:])
            np.add(total, rest, total)
        if divisor != 1:  # of one input without a pass that copies it first
            np.true_divide(total if num_inputs > 1 else inputs[0], over, total, dtype=wide)
        for out in outs:
            if out is not total:
                out[...] = total


def _may_hold(out: np.ndarray, late: Arrays, wide: np.dtype) -> bool:
    """Whether the sum may be made in an out: not if that is a term that is read afterwards."""
    return out.dtype == wide and not any(np.may_share_memory(out, term) for term in late)


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
    templates=(*SAME, *FROM_WIDE),
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
    """Every ``outs[t][j]`` becomes ``(in[0] + … + in[split-1]) + (in[split] + … ) / divisor``.

    (The division is of the whole sum.) Reads each input once and writes each out once: an
    all-reduce of replicas that one launch can reach. One launch for all tensors with the same
    dtypes and numbers of outs and inputs.

    Args:
        outs: for each tensor t at least one; overwritten. Each may be an input exactly.
        inputs: for each tensor at least one; all of one dtype.
        split: how many inputs make the first half; 0 adds all left to right.
        divisor: of the sum, in the accumulate type, before the one rounding; 1 divides nothing.
        device: whose queue launches; default that of ``outs[0][0]``. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: sizes or dtypes do not fit, an out overlaps an input partly, ``split`` leaves
            a half empty, or integers would be divided.
    """
    for terms in inputs:
        check_divisor("all_sum", divisor, terms)
        if split and not 0 < split < len(terms):
            raise ValueError(f"all_sum: split={split} of {len(terms)} inputs leaves a half empty")
    rows = zip(outs, inputs, strict=True)
    for (to, of, num_outs, num_inputs), operands in by_dtype(ALL_SUM, rows).items():
        device = device or outs[0][0].device
        scalars = (num_outs, num_inputs, split, float(divisor))
        device.launch(ALL_SUM, (to, of), operands, scalars, queue=queue)


def prepare_all_sum(device: Device, out: np.dtype, term: np.dtype) -> None:
    """Compiles what ``all_sum`` with these dtypes launches."""
    device.prepare(ALL_SUM, (element_of(out).name, element_of(term).name))
