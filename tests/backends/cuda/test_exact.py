"""Exact all-reduces on GPUs have the bits of the definition, whatever the order of the replicas."""

import numpy as np
import pytest
from support.exact_data import same
from support.exact_sums import adversarial_terms, exact_means, exact_sums, may_warn

import gradreduce as gr

pytestmark = pytest.mark.multi_gpu(2)


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64", "float64", "complex128"])
@pytest.mark.parametrize("op", list(gr.ReduceOp))
def test_an_all_reduce_has_the_bits_of_the_definition(mesh, op, dtype):
    terms = adversarial_terms(3, 30_000, dtype, 1)
    if may_warn(terms):  # the last kind of terms, which overflow
        terms = [term[:25_000] for term in terms]
    wanted = exact_sums(terms) if op is gr.ReduceOp.SUM else exact_means(terms, 3)
    for order in ([0, 1, 2], [2, 0, 1]):
        grads = [[terms[k], terms[k][:7]] for k in order]
        with mesh.journal() as journal:
            found = gr.all_reduce(grads, op, mesh=mesh, exact=True, output_type="numpy")
        assert "exact_sum" in {each.name for each in journal.records}
        assert not journal.of("collective")
        for whole, part in found:
            assert same(whole, wanted)
            assert same(part, np.ascontiguousarray(wanted[:7]))
