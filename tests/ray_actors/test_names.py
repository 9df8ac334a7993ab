"""Names of actors, which are also names of files; specs of their accumulators."""

from __future__ import annotations

import re

import numpy as np
import pytest

import gradreduce as gr

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("name", ["a", "7", "net.layer-1_w", "A" * 128])
def test_letters_digits_and_signs_inside_are_a_name(name):
    gr.ray.cluster.check_name("shared_name", name)


@pytest.mark.parametrize(
    "name",
    ["", "A" * 129, "a/b", "a#1", "..", "a..b", ".a", "-a", "_a", "a b", "ä", "a\n", "a\0", "٣"],
)
def test_any_other_string_is_refused(name):
    with pytest.raises(ValueError, match=r"^shared_name='.*' names an actor and its files: use"):
        gr.ray.cluster.check_name("shared_name", name)


def test_what_is_no_string_is_refused():
    with pytest.raises(TypeError, match=re.escape("shared_name=7 must be a string")):
        gr.ray.cluster.check_name("shared_name", 7)


@pytest.mark.parametrize("spec", ["float32", np.float32, ("float32", [2], True, 1), ()])
def test_a_spec_that_is_no_tuple_of_the_arguments_is_an_error(spec):
    text = "] must be (dtype, shape) or (dtype, shape, is_sparse)"
    with pytest.raises(TypeError, match=rf"^specs\['a'\]=.* {re.escape(text[2:])}$"):
        gr.ray.AccumulatorSet({"a": spec}, "name")


@pytest.mark.parametrize("specs", [[("float32", [2])], [("float32", [2, 1], True)]])
def test_sparse_mean_is_checked_also_without_sparse_accumulators(specs):
    for options, text in {
        ("MEAN", "rows"): 'sparse_mean \'rows\' not in: "per_row", "per_gradient"',
        ("SUM", "per_gradient"): (
            "sparse_mean='per_gradient' is only for reduction_type='MEAN'; a SUM is not divided"
        ),
    }.items():
        reduction_type, sparse_mean = options
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            gr.ray.AccumulatorSet(specs, "name", reduction_type, sparse_mean=sparse_mean)
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            gr.ray.SparseConditionalAccumulator(
                "float32", None, "name", reduction_type, sparse_mean=sparse_mean
            )


def test_a_worker_that_is_no_string_is_an_error():
    with pytest.raises(TypeError, match=r"^worker=7 must be a string or None$"):
        gr.ray.ConditionalAccumulator("float32", [3], "name", worker=7)
