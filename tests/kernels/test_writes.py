"""Every template and implementation of a kernel writes exactly what the kernel declares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.implementations import Operand, accumulate_dtype_of, buffers, opened
from support.update_formulas import FORMULAS
from support.update_operands import all_scalars, layout, rule_of

from gradreduce.device import as_dtype
from gradreduce.ops import (
    KERNELS,
    RULE_KERNELS,
    RULES,
    RuleKernel,
    accumulate_n,
    add_n,
    all_sum,
    divide,
)

SIZE = 1003  # vectors and a tail
# kernel, except those of rules -> operands, scalars
LAUNCHES = {
    "add_n": (4, (3,)),
    "accumulate_n": (4, (3,)),
    "all_sum": (5, (2, 3, 1, 1.0)),
    "pack": (2, (1.0,)),
    "divide": (2, (0.5,)),
    "segment_sum": (4, (0, 0, 1.0)),
    "take_rows": (3, ()),
    "square_sum": (2, (17, 59, 1, 0)),
    "clip": (3, (1000.0,)),
    "distance_scale": (4, (0.5,)),
}
MOMENTUM = RULE_KERNELS[RULES["momentum"], "plain"]
# rule -> scalars for every variant that change the float16 value 100
SCALARS = {name: (0.5,) * len(scalars) for name, (_, _, scalars) in FORMULAS.items()}
SCALARS["adagrad"] = (500.0,)


# of segment_sum: 31 segments of two rows, each of whole vectors
ORDER, BOUNDS, WIDTH = np.arange(62)[::-1].copy(), np.arange(0, 63, 2), 16


def dtypes_of(kernel, template, num_operands, num_written):
    """Of each operand."""
    names = [name for name in template if isinstance(name, str)]
    if isinstance(kernel, RuleKernel):
        found = [dtype for _, dtype in layout(kernel, template)]
    elif kernel.name == "distance_scale":
        found = [accumulate_dtype_of(as_dtype(names[0]))] * 2 + [names[0]] * 2
    else:
        found = [names[0]] * num_written + [names[-1]] * (num_operands - num_written)
    return [as_dtype(name) for name in found]


def row_of(device, kernel, template, num_operands, num_written):
    """100 where the kernel writes, 1 to 4 where it only reads; no result is 100."""
    sizes, plan = [SIZE] * num_operands, []
    if kernel.name == "segment_sum":
        sizes = [WIDTH * (BOUNDS.size - 1), WIDTH * ORDER.size]
        plan = [Operand(device, part) for part in (ORDER, BOUNDS)]
    if kernel.name in ("square_sum", "clip"):
        found = [np.dtype("float64" if kernel.name == "square_sum" else template[0]), template[0]]
        rest = [Operand(device, np.array([2.0]))] if kernel.name == "clip" else []
        return [Operand(device, np.full(SIZE, value).astype(as_dtype(dtype)))
                for value, dtype in zip((100, 3), found, strict=True)] + rest  # fmt: skip
    if kernel.name == "take_rows":
        sizes, plan = [WIDTH * ORDER.size, WIDTH * ORDER.size], [Operand(device, ORDER)]
    dtypes = dtypes_of(kernel, template, num_operands, num_written)
    rng = np.random.default_rng(0)
    row = []
    for place, size in enumerate(sizes):
        values = np.full(size, 100) if place < num_written else rng.integers(1, 5, size)
        row.append(Operand(device, values.astype(dtypes[place])))
    return row + plan


def launch_of(kernel, template):
    """The number of operands, and the scalars."""
    if isinstance(kernel, RuleKernel):
        scalars = all_scalars(kernel, template, SCALARS[rule_of(kernel)], period=1)
        return len(layout(kernel, template)), scalars
    if kernel.name == "add_n" and template[2]:
        return 1 + template[2], (template[2],)
    if kernel.name == "all_sum" and template[2]:
        return 2 + template[2], (2, template[2], template[2] // 2, 1.0)
    return LAUNCHES[kernel.name]


def launch(device, kernel, template):
    num_operands, scalars = launch_of(kernel, template)
    num_written = kernel.num_written(scalars)
    row = row_of(device, kernel, template, num_operands, num_written)
    device.launch(kernel, template, [buffers(row)], scalars)
    return row, num_written


def problems(row, num_written):
    """The operands that are not written as declared."""
    found = []
    for place, operand in enumerate(row):
        if not operand.contained():
            found.append(f"operand {place} was left")
        if place >= num_written and not operand.unchanged():
            found.append(f"operand {place} was written")
        if place < num_written and (operand.array == operand.values).any():
            found.append(f"operand {place} was not written everywhere")
    return found


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_is_declared_is_written_and_nothing_else(device, kernel):
    for template in kernel.templates:
        assert problems(*launch(device, kernel, template)) == [], template


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_number_written_comes_from_the_declaration(kernel):
    _, scalars = launch_of(kernel, kernel.templates[0])
    assert len(scalars) == len(kernel.scalars)
    expected = 2 if kernel.name == "all_sum" else 1
    if isinstance(kernel, RuleKernel):  # the variable, its slots, a sum or a copy
        expected += FORMULAS[rule_of(kernel)][1] + (kernel.variant != "plain")
    assert kernel.num_written(scalars) == expected


def test_a_kernel_that_declares_too_little_is_caught(device, implementation):
    liar = replace(MOMENTUM, writes=1)
    if implementation == "numpy":  # a reference gets read-only views of its inputs
        with pytest.raises(ValueError, match="read-only"):
            launch(device, liar, ("float32", "float32"))
    else:
        assert problems(*launch(device, liar, ("float32", "float32"))) == ["operand 1 was written"]


def test_a_kernel_that_declares_too_much_is_caught():
    with opened("numpy") as device:
        liar = replace(MOMENTUM, writes=3)
        found = problems(*launch(device, liar, ("float32", "float32")))
    assert found == ["operand 2 was not written everywhere"]


@pytest.mark.parametrize("call", [add_n, accumulate_n, all_sum, divide])
def test_lists_of_different_lengths_change_nothing(device, call):
    dtype = "int32" if call is divide else "float64"
    out, *terms = (Operand(device, np.ones(16, each)) for each in ("float64", dtype, dtype))
    outs = [[out.buffer]] if call is all_sum else [out.buffer]
    inputs = buffers(terms) if call is divide else [buffers(terms)] * 2
    with pytest.raises(ValueError, match="zip"):
        call(outs, inputs, *[3] * (call is divide))
    assert all(operand.unchanged() for operand in [out, *terms])
