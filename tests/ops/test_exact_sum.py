"""exact_sum in every implementation, against sums of Python's integers, bit by bit."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from support.exact_data import same
from support.exact_sums import adversarial_rows, adversarial_terms, exact_means, exact_sums
from support.implementations import (
    Operand,
    blank,
    blank_values,
    buffers,
    operands,
    random_terms,
    recorded,
    start_patterns,
)
from support.row_body import DRAWN, SumBody

from gradreduce.device import as_dtype
from gradreduce.ops import exact_sum
from gradreduce.ops.exact_sum import EXACT_SUM

MAX, LEAST = float(np.finfo(np.float32).max), 2.0**-149
INF, NAN = np.inf, np.nan
# Dtypes of the terms and of the sum.
PAIRS = [("float32",) * 2, ("float16",) * 2, ("bfloat16",) * 2, ("float32", "float16"),
         ("float32", "bfloat16"), ("complex64",) * 2]  # fmt: skip


def exactly(device, terms, out=None):
    made = blank(device, terms[0].size, out or terms[0].dtype)
    exact_sum([[made.buffer]], [[device.adopt(term) for term in terms]], device=device)
    assert made.contained()
    return made.array


class TestExactSum(SumBody):
    """Rows have two outs."""

    name = "exact_sum"
    cases = tuple(map(as_dtype, ("float16", "bfloat16", "float32", "complex64")))
    few = cases[::3]
    groups = ({"case": "float32"}, {"case": "float32", "num_inputs": 3}, {"case": "float16"})

    def row(self, case, size, seed=0, num_inputs=2, num_outs=2):
        outs = [blank_values(size, case) for _ in range(num_outs)]
        return [*outs, *random_terms(num_inputs, size, case, seed=seed)]

    def launch(self, device, rows, *, num_outs=2, divisor=1):
        outs, inputs = [row[:num_outs] for row in rows], [row[num_outs:] for row in rows]
        exact_sum(outs, inputs, divisor=divisor, device=device)

    def reference(self, case, row, *, num_outs=2, divisor=1):
        terms, to = [term[:DRAWN] for term in row[num_outs:]], row[0].dtype
        sums = exact_sums(terms, to) if divisor == 1 else exact_means(terms, divisor, to)
        return [np.resize(sums, row[0].size)] * num_outs

    @pytest.mark.parametrize("divisor", [2, 3, 7.3, 1e-320, float("inf")])
    def test_the_rounded_sum_is_divided_in_the_accumulate_dtype(self, device, case, divisor):
        for num_inputs in (1, 2, 5, 11):
            terms = adversarial_terms(num_inputs, 303, case, num_inputs)
            for num_outs in (1, 3):
                row = [*[blank_values(303, case)] * num_outs, *terms]
                self.check(device, case, [row], num_outs=num_outs, divisor=divisor)

    def test_in_place(self, device, case):
        """Every out is an input, also where the terms are read again."""
        for num_inputs in (2, 3, 8, 9):
            terms = adversarial_terms(num_inputs, 17_003, case, num_inputs)
            expected = exact_sums(terms)
            inputs = operands(device, terms)
            exact_sum([buffers(inputs)], [buffers(inputs)], device=device)
            for operand in inputs:
                assert same(operand.array, expected)
                assert operand.contained()


TEMPLATES = [template for template in EXACT_SUM.templates if template[0] != "float64"]


@pytest.mark.parametrize("template", TEMPLATES, ids=EXACT_SUM.expression)
def test_every_template_and_its_cast(device, template):
    to, of, num_inputs = template
    for count in [num_inputs] if num_inputs else [1, 2, 11]:
        terms = adversarial_terms(count, 1003, of, count, to)
        expected = exact_sums(terms, to)
        for starts in start_patterns(1 + count):
            out = blank(device, 1003, to, starts[0])
            inputs = operands(device, terms, starts[1:])
            scalars = (1, count, 1.0)
            device.launch(EXACT_SUM, template, [buffers([out, *inputs])], scalars)
            assert same(out.array, expected)
            assert out.contained()
            assert all(operand.unchanged() for operand in inputs)


def check_many(device, seed, share=1):
    """100,000 elements, or a share of them, of 1 to 1,024 terms."""
    of, to = PAIRS[seed % len(PAIRS)]
    rows = adversarial_rows(of, seed, share, to)
    outs = [device.empty(row[0].shape, to) for row in rows]
    terms = [list(map(device.adopt, row)) for row in rows]
    exact_sum([[out] for out in outs], terms, device=device)
    for out, row in zip(outs, rows, strict=True):
        assert same(out.numpy(), exact_sums(row, to)), (of, to, seed, len(row))


@pytest.mark.parametrize("seed", range(len(PAIRS)))
def test_adversarial_terms(device, seed):
    check_many(device, seed, share=len(PAIRS))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_million_adversarial_elements(device, part):
    if device.options.build == "exact":  # one thread of a GPU after the other
        check_many(device, part)
        return
    for seed in range(10 * part, 10 * part + 10):
        check_many(device, seed)


# terms, their sum
SUMS = [
    ([MAX, MAX, -MAX], MAX), ([MAX, -MAX, MAX, MAX, -MAX, -MAX], 0.0), ([MAX, MAX], INF),
    ([MAX, 2.0**102], MAX), ([MAX, 2.0**103], INF), ([MAX, 2.0**103, -LEAST], MAX),
    ([-MAX, -(2.0**103), LEAST], -MAX), ([INF, MAX, MAX], INF), ([MAX, MAX, -INF], -INF),
    ([INF, 1.0, -INF], NAN), ([NAN, 1.0], NAN), ([INF, NAN, -INF], NAN), ([-INF], -INF),
    ([LEAST, LEAST], 2 * LEAST), ([2.0**-126, -LEAST], 2.0**-126 - LEAST),
    ([1.0, LEAST, -1.0], LEAST), ([MAX, -LEAST, -MAX], -LEAST),
    ([-0.0, -0.0, -0.0], -0.0), ([-0.0], -0.0), ([-0.0, 0.0, -0.0], 0.0), ([1.0, -1.0], 0.0),
    ([MAX, LEAST, -MAX, -LEAST], 0.0), ([-MAX, -0.0, MAX], 0.0),
    ([1.0, 2.0**-24], 1.0), ([1.0, 2.0**-24, LEAST], 1 + 2.0**-23),
    ([1.0, 2.0**-24, 2.0**-60, -(2.0**-60), -LEAST], 1.0), ([1.0, 3 * 2.0**-24], 1 + 2.0**-22),
    # One bit more than a double has, of terms with neighbouring magnitudes.
    ([1.0, 2.0**-24, -(2.0**-30), 2.0**-30 + 2.0**-53], 1 + 2.0**-23),
]  # fmt: skip


@pytest.mark.parametrize(("terms", "wanted"), SUMS)
def test_sums_known_beforehand(device, terms, wanted):
    """For every number of words, and every place in a vector."""
    # More terms: with -0 the sum is the same.
    for more in (0, 9):
        arrays = [np.full(37, term, np.float32) for term in [*terms, *[-0.0] * more]]
        for order in (arrays, arrays[::-1]):
            with np.errstate(all="ignore"):
                assert same(exactly(device, order), np.full(37, wanted, np.float32))


# dtype, float32 terms, their sum, which is another one if it is rounded to float32 first
ROUNDED_ONCE = [
    ("float16", [1 + 2.0**-11, 2.0**-40], 1 + 2.0**-10),
    ("float16", [1 + 3 * 2.0**-11, -(2.0**-40)], 1 + 2.0**-10),
    ("float16", [65520.0, -(2.0**-20)], 65504.0),
    ("float16", [3 * 2.0**-25, -(2.0**-60)], 2.0**-24),
    ("bfloat16", [1 + 2.0**-8, 2.0**-40], 1 + 2.0**-7),
    ("bfloat16", [1 + 2.0**-8, 2.0**-26], 1 + 2.0**-7),
    ("bfloat16", [1 + 2.0**-8, 2.0**-40, 2.0**100, -(2.0**100)], 1 + 2.0**-7),
    ("bfloat16", [2.0**-134, LEAST, -1.0, 1.0], 2.0**-133),
]


@pytest.mark.parametrize(("dtype", "terms", "wanted"), ROUNDED_ONCE)
def test_a_16_bit_sum_is_rounded_once(device, dtype, terms, wanted):
    for sign in (1, -1):
        arrays = [np.full(37, sign * term, np.float32) for term in terms]
        for more in (0, 9):
            found = exactly(device, [*arrays, *[np.zeros(37, np.float32)] * more], as_dtype(dtype))
            assert same(found, np.full(37, sign * wanted).astype(as_dtype(dtype)))


def test_integers_are_added_by_all_sum(device):
    terms = operands(device, [np.array([each, 250], np.uint8) for each in (1, 7, 9)])
    outs = [blank(device, 2, "uint8") for _ in range(2)]
    with recorded(device) as journal:
        exact_sum([buffers(outs)], [buffers(terms)], device=device)
    assert [record.name for record in journal.records] == ["all_sum"]
    assert [out.array.tolist() for out in outs] == [[17, 750 % 256]] * 2


@pytest.mark.parametrize("pairs", [2**10, pytest.param(2**16, marks=pytest.mark.exhaustive)])
def test_more_terms_than_the_table_has_inline(device, pairs):
    """The limbs of the integer do not overflow."""
    large, least = (Operand(device, np.full(5, term, np.float32)) for term in (MAX, LEAST))
    for sign, wanted in ((1, INF), (-1, LEAST)):
        other = Operand(device, np.full(5, sign * MAX, np.float32))
        terms = [*[large.buffer] * pairs, *[other.buffer] * pairs, least.buffer]
        out = blank(device, 5, "float32")
        exact_sum([[out.buffer]], [terms], device=device)
        assert same(out.array, np.full(5, wanted, np.float32))


# ---- the oracle ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "to"), PAIRS[:-1])
def test_the_oracle_finds_the_nearest_number_by_fractions(of, to):
    info, to = ml_dtypes.finfo(as_dtype(to)), as_dtype(to)
    largest, step = Fraction(float(info.max)), Fraction(2) ** int(info.maxexp - info.nmant - 1)
    for count in (2, 3, 9):
        terms = adversarial_terms(count, 300, of, count, to)
        for sum_, *parts in zip(exact_sums(terms, to), *terms, strict=True):
            if not all(map(np.isfinite, parts)):
                continue
            exact = sum(Fraction(float(part)) for part in parts)
            if np.isinf(sum_):
                assert abs(exact) >= largest + step / 2
                assert (exact > 0) == (sum_ > 0)
                continue
            distance = abs(Fraction(float(sum_)) - exact)
            with np.errstate(over="ignore", under="ignore"):
                neighbours = np.nextafter(sum_, np.array([-INF, INF], to))
            for beside in neighbours:
                if np.isinf(beside):  # the number that it stands for
                    other = largest + step if beside > 0 else -largest - step
                else:
                    other = Fraction(float(beside))
                even = not int(sum_.view(f"u{to.itemsize}")) & 1
                nearer = abs(other - exact)
                assert distance < nearer or (distance == nearer and even)


def test_the_oracle_adds_what_is_not_finite_and_zeros():
    for terms, wanted in SUMS:
        found = exact_sums([np.full(1, term, np.float32) for term in terms])
        assert same(found, np.full(1, wanted, np.float32))
