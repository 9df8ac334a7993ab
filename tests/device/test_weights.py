"""Weights: what counts as one, and sums that do not depend on the order."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradreduce.weights import ONE, as_weight, from_units, sum_weights, to_units

FINITE = st.floats(0, allow_nan=False, allow_infinity=False, max_value=1e300)


@given(st.lists(FINITE, max_size=20), st.randoms())
def test_a_sum_is_exact_rounded_once_and_the_same_in_every_order(weights, random):
    exact = sum(map(Fraction, weights), Fraction())
    total = sum_weights(weights)
    assert Fraction(total, ONE) == exact
    assert from_units(total) == float(exact)
    random.shuffle(weights)
    assert sum_weights(weights) == total


def test_a_sum_above_the_largest_float64_is_an_error():
    with pytest.raises(OverflowError):
        from_units(2 * to_units(1.7e308))


@pytest.mark.parametrize("weight", [0, 3, 2.5, np.float32(2.5), np.int8(3), Fraction(1, 4)])
def test_a_weight_is_a_real_number(weight):
    assert as_weight("weight", weight) == weight
    assert type(as_weight("weight", weight)) is float


@pytest.mark.parametrize(
    ("weight", "shown"), [(-1, "-1"), (float("nan"), "nan"), (float("inf"), "inf")]
)
def test_a_weight_is_finite_and_not_negative(weight, shown):
    message = f"weights[1]={shown} must be a finite number of at least 0"
    with pytest.raises(ValueError) as caught:
        as_weight("weights[1]", weight)
    assert str(caught.value) == message
    with pytest.raises(ValueError):
        as_weight("weights[1]", 10**400)


@pytest.mark.parametrize("weight", [True, None, "3", np.ones(1), np.bool_(True), Decimal(3)])
def test_what_is_no_number_on_the_host_is_refused(weight):
    with pytest.raises(TypeError, match=r"^weights\[1\]=.* must be a number on the host, of at"):
        as_weight("weights[1]", weight)
