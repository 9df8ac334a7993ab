"""Names of actors, which are also names of files; specs of their accumulators."""

import re

import numpy as np
import pytest

import gradreduce as gr

pytestmark = pytest.mark.ray


def test_letters_digits_and_signs_inside_are_a_name():
    check_name = gr.ray.cluster.check_name
    for name in ("a", "7", "net.layer-1_w", "A" * 128):
        check_name("shared_name", name)
    for name in ("", "A" * 129, "a/b", "a#1", "..", "a..b", ".a", "-a", "_a", "a b", "ä", "a\n",
                 "a\0", "٣"):  # fmt: skip
        with pytest.raises(ValueError, match=r"^shared_name='.*' names an actor and its files: u"):
            check_name("shared_name", name)
    with pytest.raises(TypeError, match=r"^shared_name=7 must be a string"):
        check_name("shared_name", 7)
    with pytest.raises(TypeError, match=r"^worker=7 must be a string or None$"):
        gr.ray.ConditionalAccumulator("float32", [3], "name", worker=7)
    text = r"^specs\['a'\]=.* must be \(dtype, shape\) or \(dtype, shape, is_sparse\)$"
    for spec in ("float32", np.float32, ("float32", [2], True, 1), ()):
        with pytest.raises(TypeError, match=text):
            gr.ray.AccumulatorSet({"a": spec}, "name")


@pytest.mark.parametrize("specs", [[("float32", [2])], [("float32", [2, 1], True)]])
def test_sparse_mean_is_checked_also_without_sparse_accumulators(specs):
    not_in = 'sparse_mean \'rows\' not in: "per_row", "per_gradient"'
    only = "sparse_mean='per_gradient' is only for reduction_type='MEAN'; a SUM is not divided"
    for kind, mean, text in (("MEAN", "rows", not_in), ("SUM", "per_gradient", only)):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            gr.ray.AccumulatorSet(specs, "name", kind, sparse_mean=mean)
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            gr.ray.SparseConditionalAccumulator("float32", None, "name", kind, sparse_mean=mean)
