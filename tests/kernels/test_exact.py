"""The data and comparisons of ``exact_data.py`` find wrong sums."""

from __future__ import annotations

import numpy as np
import pytest
from support.exact_data import (
    DTYPES,
    FLOATS,
    exact_data,
    finite_data,
    random_data,
    same,
)
from support.implementations import accumulate_dtype_of

from gradreduce.device import as_dtype


def floats(*values, dtype="float32"):
    return np.array(values, as_dtype(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_tells_zeros_apart_and_not_nans(dtype):
    bits = np.dtype(f"u{dtype.itemsize}")
    nan = floats(np.nan, dtype=dtype)
    other = (nan.view(bits) ^ 1).view(dtype)
    assert same(nan, other)
    assert same(nan, -nan)
    assert not same(nan, floats(np.inf, dtype=dtype))
    assert same(floats(-0.0, dtype=dtype), floats(-0.0, dtype=dtype))
    assert not same(floats(-0.0, dtype=dtype), floats(0.0, dtype=dtype))
    one = floats(1, dtype=dtype)
    assert not same(one, (one.view(bits) + 1).view(dtype))


def test_same_looks_at_shape_and_dtype_and_both_parts():
    assert not same(floats(1, 2), floats(1, 2).reshape(2, 1))
    assert not same(floats(1), floats(1, dtype="float64"))
    assert not same(np.array([1], "int32"), np.array([1], "uint32"))
    left = np.array([complex(1, np.nan)])
    assert same(left, left.copy())
    assert not same(left, np.array([complex(2, np.nan)]))
    assert not same(left, np.array([complex(np.nan, 1)]))
    assert same(np.array(1 + 2j), np.array(1 + 2j))
    assert same(floats(), floats())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_data_has_one_sum_in_any_order(dtype):
    terms = exact_data((32, 500), dtype, seed=1)
    assert terms.dtype == dtype
    expected = terms[0]
    for term in terms[1:]:  # in the dtype itself, not in a wider one
        expected = (expected + term).astype(dtype)
    for seed in range(5):
        # In random order, halved again and again.
        left = list(np.random.default_rng(seed).permutation(terms))
        while len(left) > 1:
            pairs = zip(left[::2], left[1::2], strict=True)
            left = [(one + other).astype(dtype) for one, other in pairs]
        assert same(left[0], expected)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind not in "iu"], ids=str)
def test_the_order_of_random_data_shows(dtype):
    wide = accumulate_dtype_of(dtype)
    terms = random_data((3, 1003), dtype, seed=2).astype(wide)
    with np.errstate(all="ignore"):
        forward, backward = (terms[0] + terms[1]) + terms[2], (terms[2] + terms[1]) + terms[0]
        assert not same(forward.astype(dtype), backward.astype(dtype))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind not in "iu"], ids=str)
def test_a_thousand_finite_terms_have_a_finite_sum_whose_order_shows(dtype):
    terms = finite_data((1000, 50), dtype).astype(accumulate_dtype_of(dtype))
    sums = []
    for order in (terms, terms[::-1]):
        total = order[0]
        for term in order[1:]:
            total = total + term
        assert np.isfinite(total.astype(dtype)).all()
        sums.append(total)
    assert not same(*sums)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_random_data_holds_what_is_special(dtype):
    values = random_data((16_385,), dtype)
    assert same(values, random_data((16_385,), dtype))
    assert not same(values, random_data((16_385,), dtype, seed=1))
    assert np.isnan(values).any()
    assert np.isposinf(values.astype("float64")).any()
    assert np.isneginf(values.astype("float64")).any()
    bits = values.view(f"u{dtype.itemsize}")
    assert (bits == 0).any()
    assert (bits == 1).any()  # the least subnormal
    assert (bits == np.array(-0.0, dtype).view(bits.dtype)).any()


def test_more_terms_than_a_half_can_hold_are_refused():
    with pytest.raises(ValueError, match="num_terms=1000"):
        exact_data((4,), "bfloat16", num_terms=1000)


def test_integers_wrap():
    total = exact_data((2, 1000), "int32").astype("int64").sum(0)
    assert (np.abs(total) > 2**31).any()
