"""pack in every implementation, against a plain reference, bit by bit."""

import numpy as np
import pytest
from support.exact_data import COMPLEX, DTYPES, FLOATS, random_data, same
from support.implementations import (
    SIZES,
    Operand,
    blank,
    blank_values,
    start_patterns,
)
from support.meshes import one_device_sum
from support.row_body import RowBody

from gradreduce.device import as_dtype
from gradreduce.ops import pack
from gradreduce.ops.pack import PACK


def reference(term, gap=0, divisor=1, out=None):
    out = term.dtype if out is None else out
    through = np.dtype("float32") if (term.itemsize, out.itemsize) == (8, 2) else out  # of a double
    with np.errstate(all="ignore"):
        filled = one_device_sum([term], divisor, through).astype(out)
    return np.concatenate([filled, np.zeros(gap, out)])


class TestPack(RowBody):
    name = "pack"
    cases = DTYPES
    few = tuple(map(as_dtype, ("float16", "complex64", "uint8")))
    groups = ({"case": "float32"}, {"case": "int32"}, {"case": "float16"})

    def row(self, case, size, seed=0, gap=None):
        gap = size % 4 if gap is None else gap
        return [blank_values(size + gap, case), random_data((size,), case, seed=seed)]

    def launch(self, device, rows, *, divisor=1):
        pack([out for out, _ in rows], [term for _, term in rows], divisor=divisor)

    def reference(self, case, row, *, divisor=1):
        out, term = row
        return [reference(term, out.size - term.size, divisor, out.dtype)]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_size_gap_and_start(self, device, dtype):
        for gap in (0, 1, 7, 16, 17_003):
            rows = [self.row(dtype, size, gap=gap) for size in SIZES]
            for starts in start_patterns(2):
                self.check(device, dtype, rows, [starts] * len(rows))

    @pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
    @pytest.mark.parametrize(
        "divisor", [1, -1, 0.5, 1 / 3, 0, -0.0, 1e-320, float("inf"), float("nan")]
    )
    def test_the_values_are_divided_and_the_gap_is_not(self, device, dtype, divisor):
        """The gap contains 0.0, for any divisor, and never -0.0 or NaN."""
        shapes = ((0, 5), (5, 3), (1003, 21), (16, 32))
        rows = [self.row(dtype, size, gap=gap) for size, gap in shapes]
        for starts in start_patterns(2):
            self.check(device, dtype, rows, [starts] * len(rows), divisor=divisor)

    @pytest.mark.parametrize("template", PACK.templates, ids=PACK.expression)
    def test_every_template_and_its_cast(self, device, template):
        to, of = map(as_dtype, template)
        rows = [[blank_values(size + 9, to), random_data((size,), of)] for size in (1003, 16, 3)]
        for divisor in (1,) if of.kind == "u" else (1, -1 / 3):
            for starts in start_patterns(2):
                self.check(device, of, rows, [starts] * len(rows), divisor=divisor)

    def test_complex_terms_of_a_wider_out(self, device):
        row = [blank_values(1010, "complex128"), random_data((1003,), "complex64")]
        self.check(device, "complex64", [row], divisor=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(device, dtype):
    """The out may be the input, also if it is longer."""
    divisor = 1 if dtype.kind in "iu" else -3
    for gap in (0, 5, 40_000):
        values = random_data((20_003 + gap,), dtype)
        memory = Operand(device, values)
        pack([memory.buffer], [memory.buffer.view(0, (20_003,))], divisor=divisor)
        assert same(memory.array, reference(values[:20_003], gap, divisor))
        assert memory.contained()


def test_an_empty_input_may_lie_anywhere_in_the_out(device):
    memory = Operand(device, random_data((16,), "float32"))
    for start in (0, 7, 16):
        pack([memory.buffer], [memory.buffer.view(start, (0,))])
        assert same(memory.array, np.zeros(16, "float32"))
        assert memory.contained()


@pytest.mark.parametrize("out", ["float16", "bfloat16"])
def test_a_double_is_rounded_to_a_float_on_its_way_to_a_half(device, out):
    """It is above the middle of two float16 by less than float32 resolves: rounds to even."""
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[out]
    above = np.full(40, 1 + unit / 2 + 2.0**-40)
    halves = blank(device, above.size, as_dtype(out))
    pack([halves.buffer], [Operand(device, above).buffer])
    assert same(halves.array, np.ones(above.size, as_dtype(out)))
