"""Sparse accumulators with ``exact=True``: rows that repeat, launches, memory that grows."""

import numpy as np
import pytest
from accumulator.kinds import Sparse
from accumulator.test_exact import FORMATS, defined, equal, make, mesh, on_each, opened, taken
from support.compiled_first import check_compiled_first
from support.exact_data import same

import gradreduce as gr
from gradreduce.device import as_dtype

__all__ = ["mesh"]


def test_an_index_may_occur_many_times(mesh):
    """As the padding of sentences; rows that few have in between."""
    luck = np.random.default_rng(0)
    indices = np.minimum(luck.zipf(1.4, 700), 40)
    rows = luck.standard_normal((700, 2)).astype(np.float32)
    wanted = defined("SUM", "float32", [(indices, rows)])
    assert wanted[2] > 200
    for acc in on_each(mesh, Sparse):
        for part in np.array_split(np.arange(700), [0, 500, 503, 650]):
            acc.apply_grad(indices[part], rows[part])
        assert equal(taken(acc, 5), wanted)
        acc.apply_grad([7] * 100, np.full((100, 1), -0.0, "float32"), None, 1)
        assert same(taken(acc)[1], np.float32([[-0.0]]))


def test_a_sum_that_grows_keeps_its_words(mesh):
    """Of rows without elements, too."""
    acc = make(Sparse, shape=(200, 1), device=mesh.devices[1])
    for values in ([1e8, 0.5], [-1e8]):
        for index in range(200):
            acc.apply_grad([index] * len(values), np.float32(values)[:, None])
    assert acc.accumulator_ref.totals[0].arrays[0].shape == (200, 1)
    assert taken(acc, 400)[1].tolist() == [[0.5]] * 200
    acc = make(Sparse, device=mesh)
    acc.apply_grad([4, 4], np.empty((2, 0), "float32"))
    acc.apply_grad([], np.empty((0, 0), "float32"))
    assert taken(acc, 2)[1].shape == (1, 0)


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_launches_of_a_gradient_and_a_take(repeats):
    """A gather, one addition for each number of rows of an index, and a scatter."""
    with opened((0,)) as mesh:
        accs = [make(Sparse, device=mesh) for _ in range(2)]
        rows = mesh.devices[0].put(np.ones((2 + repeats, 4), "float32"))
        grad = gr.IndexedSlices(rows, [5, 2, *[7] * repeats])
        gr.apply_grads(accs, [grad] * 2)
        with mesh.journal() as journal:
            gr.apply_grads(accs, [grad] * 2)
        adds = ["add_words"] * (1 + (repeats > 1))
        assert [each.name for each in journal.of("launch")] == ["take_rows", *adds, "segment_sum"]
        assert (journal.uploads, journal.copies, journal.syncs) == (2, 0, 0)
        with mesh.journal() as journal:
            accs[0].take_indexed_slices_grad(1)
        names = [each.name for each in journal.of("launch")]
        assert names == ["exact_sum", "segment_sum"]


@pytest.mark.parametrize("repeats", [2, 100])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("over_mesh", [True, False])
def test_no_call_compiles_after_its_first_launch(over_mesh, dtype, repeats):
    """However many rows have the same index, and on however many devices."""

    def calls(mesh):
        home = mesh if over_mesh else mesh.devices[1]
        acc = make(Sparse, dtype, device=home)
        yield
        for device in range(4):
            with gr.replica(device):
                indices = [*[9] * repeats, *range(device)]
                acc.apply_grad(indices, np.ones((len(indices), 2), dtype))
            yield
        acc.take_indexed_slices_grad(4)
        yield

    with opened((0, 0, 1, 2), strict=False) as mesh:
        check_compiled_first(mesh, calls)


def test_a_state_has_canonical_words_in_the_order_of_the_indices():
    with opened((0, 0)) as mesh:
        acc = make(Sparse, "bfloat16", device=mesh)
        with gr.replica(1):
            for indices, value in (([9], 2.0**-30), ([4, 9], 1), ([9], -(2.0**-60))):
                acc.apply_grad(indices, np.full((len(indices), 2), value, as_dtype("bfloat16")))
        state = acc.state_dict()
        assert (state["format"], state["dtype"]) == (FORMATS[Sparse], "bfloat16")
        nothing, total = state["partial_sums"]
        assert nothing is None
        assert (total["indices"].tolist(), total["num_touches"].tolist()) == ([4, 9], [1, 3])
        words = np.float32([[1, 0, 0], [1, 2.0**-30, -(2.0**-60)]])
        assert same(total["values"], np.repeat(words[:, :, None], 2, 2))
