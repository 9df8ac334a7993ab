"""exact_sum of float64 and complex128, which it adds in eight words: bits, and sums of integers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import same
from support.exact_sums import adversarial_rows, adversarial_terms, exact_sums, fit_into
from support.exhaustive import examples
from support.implementations import Operand, blank, blank_values, operands, random_terms
from support.row_body import RowBody

from gradreduce.device import as_dtype
from gradreduce.ops import exact_sum
from gradreduce.ops.exact_sum import EXACT_SUM

MAX, LEAST = float(np.finfo(np.float64).max), 2.0**-1074
INF, NAN = np.inf, np.nan
BEFORE = -1515870811  # of a flag that must not be written
PIECE = 37  # elements of a tensor


class TestExactSumOfDoubles(RowBody):
    """The bits are those of the reference, which is compared with integers below."""

    name = "exact_sum"
    cases = tuple(map(as_dtype, ("float64", "complex128")))
    few = cases[:1]
    groups = ({"case": "float64"}, {"case": "complex128", "num_inputs": 3})

    def row(self, case, size, seed=0, num_inputs=2):
        outs = [blank_values(size, case) for _ in range(2)]
        flag = np.full(1, BEFORE, np.int32)
        return [*outs, flag, *random_terms(num_inputs, size, case, seed)]

    def launch(self, device, rows, *, divisor=1):
        outs, flags, inputs = (
            [row[part] for row in rows] for part in (slice(2), 2, slice(3, None))
        )
        exact_sum(outs, inputs, divisor=divisor, flags=flags, device=device)

    def reference(self, case, row, *, divisor=1):
        written = [values.copy() for values in row[:3]]
        sums, terms = ([part.view(np.float64) for part in some] for some in (written[:2], row[3:]))
        with np.errstate(all="ignore"):
            EXACT_SUM.reference([[*sums, written[2], *terms]], 3, len(terms), float(divisor))
        return written

    @pytest.mark.parametrize("divisor", [3, 7.3])
    def test_every_number_of_inputs_and_divisor(self, device, case, divisor):
        for num_inputs in range(1, 12):
            row = self.row(case, 1003, num_inputs, num_inputs)
            self.check(device, case, [row])
            self.check(device, case, [row], divisor=divisor)

    def test_in_place(self, device, case):
        for num_inputs in (2, 9):
            row = self.row(case, 17_003, num_inputs=num_inputs)
            made = operands(device, row)
            inputs = [each.buffer for each in made[3:]]
            exact_sum([inputs[:2]], [inputs], flags=[made[2].buffer], device=device)
            *sums, flag = self.reference(case, row)
            assert all(map(same, [each.array for each in made[3:5]], sums))
            assert same(made[2].array, flag)
            assert all(each.unchanged() for each in made[5:])


def check_pieces(device, terms):
    """Each piece is a tensor. Without a flag its sum is exact; if it fits, it has none."""
    size = terms[0].size
    out, starts = np.empty(size), np.arange(0, size, PIECE)
    flags = np.full(starts.size, BEFORE, np.int32)
    arrays = [device.adopt(out), *map(device.adopt, terms)]
    pieces = [[each.view(at, (min(PIECE, size - at),)) for each in arrays] for at in starts]
    whole = device.adopt(flags)
    exact_sum(
        [row[:1] for row in pieces], [row[1:] for row in pieces],
        flags=[whole.view(number, (1,)) for number in range(flags.size)], device=device,
    )  # fmt: skip
    assert set(flags.tolist()) <= {BEFORE, 1}
    kept = np.repeat(flags == BEFORE, PIECE)[:size]
    assert same(out[kept], exact_sums([term[kept] for term in terms]))
    assert not np.logical_and.reduceat(fit_into(8, terms), starts)[flags == 1].any()


@pytest.mark.parametrize("seed", range(2))
def test_adversarial_terms(device, seed):
    for terms in adversarial_rows("float64", seed, 8):
        check_pieces(device, terms)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_ten_million_adversarial_elements(device, seed):
    for terms in adversarial_rows("float64", seed, 1 if device.options.build != "exact" else 20):
        check_pieces(device, terms)


# terms, their sum, whether the flag is set
SUMS = [
    ([1.0, 2.0**-53], 1.0, False), ([1.0, 2.0**-53, LEAST], 1 + 2.0**-52, False),
    ([1.0, 2.0**-53, -LEAST], 1.0, False), ([1.0, 3 * 2.0**-53, -LEAST], 1 + 2.0**-52, False),
    ([MAX, 2.0**970], INF, True), ([MAX, 2.0**970, -LEAST], None, True),
    ([MAX, 2.0**969, 2.0**968], MAX, False),
    ([MAX, 2.0**969, 2.0**969], INF, True), ([MAX, LEAST, -MAX], LEAST, False),
    ([INF, 1.0, 2.0], INF, False), ([INF, 1.0, -INF], NAN, False), ([NAN, 1.0], NAN, False),
    ([-0.0, -0.0], -0.0, False), ([-0.0, 0.0], 0.0, False), ([1.0, -1.0], 0.0, False),
    ([2.0**-1022, -LEAST], 2.0**-1022 - LEAST, False), ([-1.0, -INF], -INF, False),
    ([2.0 ** (60 * k) for k in range(8)], 2.0**420, False),
    ([2.0 ** (60 * k) for k in range(9)], None, True),
    # Words that are rounded one after the other to nearest give another sum.
    ([2.0**60, 2.0**7, 2.0**-46, 2.0**-99], 2.0**60 + 2.0**8, False),
    ([2.0**60, 2.0**7, 2.0**-46, -(2.0**-99)], 2.0**60 + 2.0**8, False),
    ([2.0**60, 2.0**7, -(2.0**-47), -(2.0**-100)], 2.0**60, False),
]  # fmt: skip


@pytest.mark.parametrize(("terms", "wanted", "flagged"), SUMS)
def test_sums_known_beforehand(device, terms, wanted, flagged):
    arrays = [np.full(PIECE, term) for term in terms]
    for order in (arrays, arrays[::-1]):
        out, flag = blank(device, PIECE, "float64"), Operand(device, np.full(1, BEFORE, np.int32))
        exact_sum(
            [[out.buffer]], [list(map(device.adopt, order))], flags=[flag.buffer], device=device
        )
        if wanted is not None:
            assert same(out.array, np.full(PIECE, wanted))
        assert flag.array.tolist() == [1 if flagged else BEFORE]
        assert out.contained()
        assert flag.contained()


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_sums_in_any_order_are_those_of_fsum(device, data):
    count = data.draw(st.integers(1, 40), "terms")
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6), "seed"))
    terms = rng.standard_normal((count, PIECE)) * np.exp2(rng.integers(-120, 120, (count, PIECE)))
    terms[1::3] = -terms[: terms[1::3].shape[0]]
    order = data.draw(st.permutations(range(count)), "order")
    out, flag = blank(device, PIECE, "float64"), Operand(device, np.full(1, BEFORE, np.int32))
    exact_sum([[out.buffer]], [[device.adopt(terms[k]) for k in order]], flags=[flag.buffer],
              device=device)  # fmt: skip
    assert flag.unchanged()
    assert same(out.array, np.array([math.fsum(column) + 0.0 for column in terms.T]))


def test_the_oracle_is_fsum():
    for count in (1, 2, 9, 40):
        for column in np.transpose(adversarial_terms(count, 300, "float64", count)):
            try:
                wanted = math.fsum(column)
            except (OverflowError, ValueError):  # on the way, or inf - inf
                continue
            found = exact_sums([np.array([term]) for term in column])[0]
            assert found == wanted or (found != found and wanted != wanted)
