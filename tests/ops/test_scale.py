"""scale and add_scaled in every implementation, against a plain reference, bit by bit."""

from fractions import Fraction

import numpy as np
import pytest
from support.exact_data import COMPLEX, DTYPES, FLOATS, INTEGERS, random_data, same
from support.implementations import Operand, blank, blank_values, random_terms, start_patterns
from support.meshes import one_device_sum
from support.row_body import RowBody

from gradreduce.device import accumulate_dtype, as_dtype
from gradreduce.ops import add_scaled, scale
from gradreduce.ops.scale import ADD_SCALED, SCALE

WEIGHTS = (0.0, 1.0, 3.0, 0.1, 1e-40, 1e300)


def wider(out, term):
    """The dtype of products."""
    return max(accumulate_dtype(out), accumulate_dtype(term), key=lambda dtype: dtype.itemsize)


def product(term, weight, dtype):
    """The products in a dtype, rounded once: by Fractions where NumPy rounds twice."""
    term = term.astype(dtype)
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            return term * np.array(int(weight)).astype(dtype)
        if dtype.itemsize == 8 and dtype.kind == "f":
            return term * weight
        if dtype.kind == "c":
            parts = term.view(term.real.dtype)
            return product(parts, weight, parts.dtype).view(dtype)
        rounded = np.float32(weight)
        if float(rounded) == weight:
            return term * rounded
    return np.array([once(each, weight) for each in term], np.float32).reshape(term.shape)


def once(term, weight):
    """A product, rounded once to float32."""
    if not np.isfinite(term) or term == 0:
        return np.float32(float(term) * weight)
    exact = Fraction(float(term)) * Fraction(weight)
    if abs(exact) < Fraction(2) ** -149 / 2:
        return np.copysign(np.float32(0), term) if weight else np.float32(0) * term
    exponent = abs(exact).numerator.bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(exact / unit) * unit
    return np.float32(float(rounded)) if abs(rounded) < 2**128 else np.float32(np.inf) * term


class TestScale(RowBody):
    name = "scale"
    cases = DTYPES
    few = tuple(map(as_dtype, ("float16", "complex64", "uint8")))
    groups = ({"case": "float32"}, {"case": "int32"}, {"case": "float16"})

    def row(self, case, size, seed=0, gap=None):
        gap = size % 4 if gap is None else gap
        return [blank_values(size + gap, case), random_data((size,), case, seed=seed)]

    def launch(self, device, rows, *, weight=3.0, divisor=1):
        outs, terms = zip(*rows, strict=True) if rows else ((), ())
        scale(outs, terms, weight, divisor=divisor, device=device)

    def reference(self, case, row, *, weight=3.0, divisor=1):
        out, term = row
        values = product(term, weight, wider(out.dtype, term.dtype))
        through = np.dtype("float32") if (values.itemsize, out.itemsize) == (8, 2) else out.dtype
        with np.errstate(all="ignore"):
            filled = one_device_sum([values], divisor, through).astype(out.dtype)
        return [np.concatenate([filled, np.zeros(out.size - term.size, out.dtype)])]

    @pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
    def test_weights_and_divisors(self, device, dtype):
        rows = [self.row(dtype, size, gap=gap) for size, gap in ((0, 5), (5, 3), (203, 21))]
        for weight in WEIGHTS:
            for divisor in (1, 3.0):
                for starts in start_patterns(2):
                    given = {"weight": weight, "divisor": divisor}
                    self.check(device, dtype, rows, [starts] * len(rows), **given)

    @pytest.mark.parametrize("dtype", INTEGERS, ids=str)
    def test_whole_weights_of_integers_wrap(self, device, dtype):
        for weight in (0.0, 3.0, 2.0**40 + 1):
            self.check(device, dtype, [self.row(dtype, 203)], weight=weight)

    @pytest.mark.parametrize("template", SCALE.templates, ids=SCALE.expression)
    def test_every_template_and_its_cast(self, device, template):
        to, of = map(as_dtype, template)
        rows = [[blank_values(size + 9, to), random_data((size,), of)] for size in (203, 16, 3)]
        for weight in (3.0,) if of.kind == "u" else (3.0, 0.1):
            for starts in start_patterns(2):
                self.check(device, of, rows, [starts] * len(rows), weight=weight)


class TestAddScaled(RowBody):
    name = "add_scaled"
    cases = tuple(each for each in DTYPES if each.itemsize != 2 or each.kind in "iu")
    few = tuple(map(as_dtype, ("float32", "complex64", "uint8")))
    groups = ({"case": "float32"}, {"case": "int32"}, {"case": "float64"})

    def row(self, case, size, seed=0):
        return random_terms(2, size, case, seed=seed)

    def launch(self, device, rows, *, weight=3.0):
        totals, terms = zip(*rows, strict=True) if rows else ((), ())
        add_scaled(totals, terms, weight, device=device)

    def reference(self, case, row, *, weight=3.0):
        total, term = row
        with np.errstate(all="ignore"):
            values = product(term, weight, wider(total.dtype, term.dtype))
            return [total + values.astype(total.dtype)]

    @pytest.mark.parametrize("template", ADD_SCALED.templates, ids=ADD_SCALED.expression)
    def test_every_template_and_its_cast(self, device, template):
        to, of = template
        row = [random_data((203,), to, seed=99), *random_terms(1, 203, of)]
        for weight in (3.0,) if as_dtype(to).kind in "iu" else WEIGHTS:
            for starts in start_patterns(2):
                self.check(device, of, [row], [starts], weight=weight)


def test_a_product_near_the_middle_of_two_floats_is_rounded_once(device):
    """In float64 each of these products is rounded to the middle, and then to the wrong side."""
    rng = np.random.default_rng(0)
    cases = []
    while len(cases) < 40:
        odd = int(rng.integers(2**22, 2**23)) * 2 + 1
        side = 1 if len(cases) % 2 else -1  # of the middle
        weight = float((2**52 + side) * pow(odd, -1, 2**53) % 2**53)
        wanted = once(np.float32(odd), weight)
        if weight >= 2**52 and wanted != np.float32(odd * weight):
            cases.append((odd, weight, wanted))
    while len(cases) < 80:  # of subnormal numbers
        odd, below = int(rng.integers(2**22, 2**23)) * 2 + 1, int(rng.integers(1, 2**20))
        weight = (below + 0.5) * 2.0**-149 / odd
        wanted = once(np.float32(odd), weight)
        if wanted != np.float32(odd * weight):
            cases.append((odd, weight, wanted))
    for odd, weight, wanted in cases:
        term = np.full(37, odd, np.float32)
        for sign in (1, -1):
            out = blank(device, term.size, np.dtype("float32"))
            scale([out.buffer], [Operand(device, sign * term).buffer], weight, device=device)
            assert same(out.array, np.full(term.size, sign * wanted))
