"""``sparse_mean``: rows divided by their own count, or by the number of gradients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from accumulator.kinds import Sparse, bits, mapped
from support.exact_data import FLOATS

import gradreduce as gr
from gradreduce.device import accumulate_dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_calls", [1, 3])
def test_per_gradient_is_the_sum_divided_by_the_number_of_gradients(home, dtype, num_calls):
    """Each replica of a PerReplica is one gradient, also one without rows; one rounding."""
    wide, size = accumulate_dtype(dtype), len(home) if isinstance(home, gr.Mesh) else 1
    mean = Sparse.make(dtype, (12, 3), device=home, sparse_mean="per_gradient")
    total = Sparse.make(wide, (12, 3), device=home, reduction_type="SUM")
    given = [Sparse.random(seed, dtype, (3,)) for seed in range(num_calls * size + 1)]
    given[0] = gr.IndexedSlices(np.empty((0, 3), dtype), [])
    for call in range(num_calls):
        grads = given[call * size : (call + 1) * size]
        spread = gr.PerReplica(grads, home) if isinstance(home, gr.Mesh) else grads[0]
        gr.apply_grads([mean, total], [spread] * 2, cast=True)
    gr.apply_grads([mean, total], [given[-1]] * 2, cast=True)  # from one replica alone
    assert mean.num_accumulated() == len(given)
    taken, summed = gr.take_grads([mean, total], 1, output_type="numpy")
    parts = [each.values if size > 1 else [each] for each in (taken, summed)]
    with np.errstate(all="ignore"):
        wanted = [
            mapped(part, lambda rows: (rows / wide.type(len(given))).astype(dtype))
            for part in parts[1]
        ]
    assert list(map(bits, parts[0])) == list(map(bits, wanted))


@pytest.mark.parametrize("wrong", ["per row", "PER_ROW", "", None, 1, "per_gradient"])
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
def test_another_sparse_mean_is_an_error(device, wrong, reduction_type):
    """A sum has no divisor."""
    text = f'sparse_mean {wrong!r} not in: "per_row", "per_gradient"'
    if wrong == "per_gradient":
        reduction_type = "SUM"
        text = "sparse_mean='per_gradient' is only for reduction_type='MEAN'; a SUM is not divided"
    make = partial(Sparse.make, "float32", reduction_type=reduction_type, device=device)
    with pytest.raises(ValueError) as error:
        make(shared_name="named", sparse_mean=wrong)
    assert str(error.value) == text
    make(shared_name="named", sparse_mean="per_row").close()  # the name is free
