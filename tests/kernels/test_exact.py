"""The data and comparisons of ``exact_data.py`` find wrong sums."""

from functools import reduce

import numpy as np
import pytest
from support.exact_data import DTYPES, FLOATS, exact_data, finite_data, random_data, same
from support.implementations import accumulate_dtype_of

ROUNDED = [dtype for dtype in DTYPES if dtype.kind not in "iu"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_tells_zeros_apart_and_not_nans(dtype):
    bits = np.dtype(f"u{dtype.itemsize}")
    nan, one, zero, inf = (np.array([each], dtype) for each in (np.nan, 1, 0, np.inf))
    assert same(nan, (nan.view(bits) ^ 1).view(dtype))
    assert same(nan, -nan)
    assert same(-zero, -zero)
    for left, right in ((nan, inf), (-zero, zero), (one, (one.view(bits) + 1).view(dtype))):
        assert not same(left, right)


def test_same_looks_at_shape_and_dtype_and_both_parts():
    left = np.array([complex(1, np.nan)])
    for equal in (left, np.array(1 + 2j), np.array([], "float32")):
        assert same(equal, equal.copy())
    one = np.ones(2, "int32")
    for other in (one.reshape(2, 1), one.astype("uint32"), one.astype("int64")):
        assert not same(one, other)
    for other in (complex(2, np.nan), complex(np.nan, 1)):
        assert not same(left, np.array([other]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_data_has_one_sum_in_any_order(dtype):
    terms = exact_data((32, 500), dtype, seed=1)
    assert terms.dtype == dtype
    expected = reduce(lambda a, b: (a + b).astype(dtype), terms)  # not in a wider dtype
    for seed in range(5):
        # In random order, halved again and again.
        left = list(np.random.default_rng(seed).permutation(terms))
        while len(left) > 1:
            pairs = zip(left[::2], left[1::2], strict=True)
            left = [(one + other).astype(dtype) for one, other in pairs]
        assert same(left[0], expected)
    if dtype.kind in "iu":
        assert (terms.astype(object).sum(axis=0) != expected.astype(object)).any(), "none wraps"


def sums_of(terms):
    """Of the terms in order, and of those in reverse."""
    wide = terms.astype(accumulate_dtype_of(terms.dtype))
    with np.errstate(all="ignore"):
        return [reduce(np.add, order) for order in (wide, wide[::-1])]


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_the_order_of_other_data_shows(dtype):
    with np.errstate(all="ignore"):
        sums = [total.astype(dtype) for total in sums_of(random_data((3, 1003), dtype, seed=2))]
    assert not same(*sums)
    sums = sums_of(finite_data((1000, 50), dtype))
    assert not same(*sums)
    assert all(np.isfinite(total.astype(dtype)).all() for total in sums)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_random_data_holds_what_is_special(dtype):
    values = random_data((16_385,), dtype)
    assert same(values, random_data((16_385,), dtype))
    assert not same(values, random_data((16_385,), dtype, seed=1))
    assert np.isnan(values).any()
    assert {np.inf, -np.inf} <= {*values.astype("float64").tolist()}
    bits = values.view(f"u{dtype.itemsize}")
    minus_zero = np.array(-0.0, dtype).view(bits.dtype)
    assert all((bits == each).any() for each in (0, 1, minus_zero))  # 1 is the least subnormal


def test_more_terms_than_a_half_can_hold_are_refused():
    with pytest.raises(ValueError, match="num_terms=1000"):
        exact_data((4,), "bfloat16", num_terms=1000)
