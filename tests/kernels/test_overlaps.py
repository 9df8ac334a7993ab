"""Every written operand of every kernel against every other one: what overlaps partly is refused.

That an operand may be another one exactly, and where, each kernel's own tests show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from support.exact_data import random_data
from support.implementations import Operand, buffers, recorded

from gradreduce import ops
from gradreduce.device import Buffer, as_dtype

SIZE = 16


class Call(NamedTuple):
    """One launcher.

    Attributes:
        launch: with rows of operands, the written ones first.
        num_written: of each row.
        rows: dtypes of the operands of one, for each that is tried.
    """

    launch: Callable[[list[list[Buffer]]], None]
    num_written: int
    rows: list[tuple[str, ...]]


def casts(num_written: int, num_read: int, *pairs: tuple[str, str]) -> list[tuple[str, ...]]:
    """Rows of one dtype in what is written, and of one in what is read."""
    return [(to,) * num_written + (of,) * num_read for to, of in pairs]


SAME = (("bfloat16", "bfloat16"), ("float32", "float32"), ("complex128", "complex128"))
MEANS = (("float32", "uint8"), ("float32", "int16"), ("float64", "uint32"), ("float64", "int64"))
WIDER, NARROWER = ("float32", "bfloat16"), ("float16", "float32")
CALLS = {
    "add_n": Call(
        lambda rows: ops.add_n([row[0] for row in rows], [row[1:] for row in rows]),
        1, casts(1, 4, *SAME, WIDER),
    ),
    "accumulate_n": Call(
        lambda rows: ops.accumulate_n([row[0] for row in rows], [row[1:] for row in rows]),
        1, casts(1, 4, *SAME, WIDER),
    ),
    "all_sum": Call(
        lambda rows: ops.all_sum([row[:3] for row in rows], [row[3:] for row in rows], 1),
        3, casts(3, 3, *SAME, NARROWER),
    ),
    "pack": Call(
        lambda rows: ops.pack([row[0] for row in rows], [row[1] for row in rows]),
        1, casts(1, 1, *SAME, WIDER, NARROWER),
    ),
    "divide": Call(
        lambda rows: ops.divide([row[0] for row in rows], [row[1] for row in rows], 3),
        1, casts(1, 1, *MEANS),
    ),
}  # fmt: skip


def test_every_elementwise_kernel_is_here():
    """segment_sum, whose operands have sizes of their own, has tests of its own.

    Update kernels and ``distance_scale`` are launched without validation, on operands that
    optimizers create.
    """
    assert {*CALLS, "distance_scale"} == {
        kernel.name
        for kernel in ops.KERNELS
        if kernel.items is None and not isinstance(kernel, ops.RuleKernel)
    }


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_pair_overlaps_partly(device, call):
    """By any number of elements, in front or behind; and not with another dtype at one place."""
    for row in call.rows:
        dtypes = [as_dtype(name) for name in row]
        for written in range(call.num_written):
            for other in set(range(len(row))) - {written}:
                size, other_size = (dtypes[place].itemsize for place in (written, other))
                step = max(size, other_size)
                near = [0] if size != other_size else []
                for shift in (*near, -step, step, step - SIZE * other_size, SIZE * size - step):
                    refuse(device, call, dtypes, (written, other), shift)


def refuse(device, call: Call, dtypes, pair: tuple[int, int], shift: int) -> None:
    """Asserts that a row is refused, and the row in front of it with it.

    Args:
        device: that launches.
        call: what is launched.
        dtypes: of the operands of a row.
        pair: the two that overlap.
        shift: how far the second of them lies behind the first, in bytes.
    """
    memory = Operand(device, random_data((1024,), "uint8"))
    good = [Operand(device, random_data((SIZE,), dtype)) for dtype in call.rows[0]]
    bad = [Operand(device, random_data((SIZE,), dtype)) for dtype in dtypes]
    row = buffers(bad)
    for place, start in zip(pair, (512, 512 + shift), strict=True):
        row[place] = memory.buffer.view(start, (SIZE,), dtypes[place])
    with recorded(device) as journal, pytest.raises(ValueError, match="overlaps"):
        call.launch([buffers(good), row])
    assert journal.records == []
    assert all(operand.unchanged() for operand in [memory, *good, *bad])
