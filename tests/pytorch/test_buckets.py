"""The plan of which parameters are reduced together."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.torch


def planned(sizes, order, most):
    from gradreduce.torch.buckets import plan_buckets

    parameters = [SimpleNamespace(dtype=dtype, nbytes=nbytes) for dtype, nbytes in sizes]
    return plan_buckets(parameters, order, most)


def test_buckets_fill_in_the_order_of_readiness():
    sizes = [("f", 4), ("f", 4), ("f", 9), ("f", 1), ("f", 4)]
    assert planned(sizes, [4, 3, 2, 1, 0], 8) == [[4, 3], [2], [1, 0]]
    assert planned(sizes, [4, 3, 2, 1, 0], 100) == [[4, 3, 2, 1, 0]]
    assert planned([], [], 8) == []


def test_a_bucket_has_one_dtype_and_its_place_is_that_of_its_last_parameter():
    sizes = [("f", 4), ("h", 2), ("f", 4), ("h", 2)]
    assert planned(sizes, [0, 1, 2, 3], 8) == [[0, 2], [1, 3]]
    assert planned(sizes, [1, 3, 0, 2], 4) == [[1, 3], [0], [2]]
    assert planned(sizes, [1, 0, 2, 3], 4) == [[0], [2], [1, 3]]
