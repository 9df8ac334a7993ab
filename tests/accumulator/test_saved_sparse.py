"""What is saved of a sparse accumulator; what it shares with a dense one is tested there."""

from __future__ import annotations

import json

import numpy as np
import pytest
from exact import FLOATS, random_data, same
from saving import check_refused

import gradreduce as gr
from gradreduce.device import accumulate_dtype
from gradreduce.errors import InvalidArgumentError


def arrival(seed, dtype, num_rows=7):
    """Unsorted and repeated indices, and their rows."""
    indices = np.random.default_rng(seed).integers(0, 9, num_rows)
    return indices, random_data((num_rows, 2), dtype, seed=seed)


def taken(acc):
    indices, values, shape = acc.take_grad(1)
    rows = values.values if isinstance(values, gr.Mirrored) else [values]
    return [np.array(shape), np.asarray(indices), *map(np.asarray, rows)]


def restored(state):
    """By a store that knows JSON and arrays."""
    sums = state.pop("partial_sums")
    return {**json.loads(json.dumps(state)), "partial_sums": sums}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
def test_what_goes_on_from_a_state_has_the_same_bits(mesh, dtype, reduction_type):
    everyone = range(len(mesh))
    for shape, filled in (((None, 2), ()), (None, everyone[1:2]), ((9,), everyone)):
        acc, fresh = (
            gr.SparseConditionalAccumulator(
                dtype, shape, reduction_type=reduction_type, device=mesh
            )
            for _ in range(2)
        )
        for place in filled:
            with gr.replica(place):
                for seed, num_rows in ((place, 7), (50 + place, 0), (60 + place, 12)):
                    acc.apply_grad(*arrival(seed, dtype, num_rows))
        with mesh.journal() as journal:
            state = acc.state_dict()
        assert (journal.copies, journal.launches, journal.uploads) == (len(filled), 0, 0)
        sums = state["partial_sums"]
        assert [each is not None for each in sums] == [place in filled for place in everyone]
        for each in filter(None, sums):
            assert [array.dtype for array in each.values()] == [
                *["int64"] * 2,
                accumulate_dtype(dtype),
            ]
        before = json.dumps([each and [array.tolist() for array in each.values()] for each in sums])
        fresh.apply_grad([0], np.ones((1, 2), dtype))  # of another life
        fresh.load_state_dict(restored(dict(state)))
        results = []
        for each in (acc, fresh):
            with gr.replica(1):  # rows that are there and new ones, in place and in more memory
                for seed in range(80, 83):
                    each.apply_grad(*arrival(seed, dtype))
            results.append([each.num_accumulated(), *taken(each)])
        assert results[0][0] == results[1][0]
        assert all(map(same, results[0][1:], results[1][1:]))
        after = json.dumps([each and [array.tolist() for array in each.values()] for each in sums])
        assert before == after, "what came later shows in it"


def test_a_gradient_without_rows_counts(device):
    acc, fresh = (gr.SparseConditionalAccumulator("float16", device=device) for _ in range(2))
    acc.apply_grad([], np.ones((0, 2), "float16"))
    state = acc.state_dict()
    assert (state["sum_shape"], state["num_accumulated"]) == ([-1, 2], 1)
    fresh.load_state_dict(state)
    fresh.apply_grad([4], np.ones((1, 2), "float16"))
    assert fresh.num_accumulated() == 2
    assert fresh.take_grad(2)[1].tolist() == [[1.0, 1.0]]


ROWS = {
    "indices": np.array([1, 4]),
    "num_touches": np.array([1, 2]),
    "values": np.ones((2, 3), "float32"),
}
WRONG = {
    "dense": ({"partial_sums": [ROWS["values"]]}, TypeError, "[0] is a ndarray, not a dict"),
    "keys": ({"partial_sums": [{"indices": [1]}]}, KeyError, "[0] has ['indices'], must have"),
    "rank": ({"sum_shape": [5]}, ValueError, "['sum_shape'] is (5,), which does not fit"),
    "rows": ({"sum_shape": [6, 3]}, ValueError, "['sum_shape'] is (6, 3), which does not fit"),
    "open": ({"sum_shape": [5, None]}, ValueError, "['sum_shape'] is (5, None), which does not"),
    "less": ({"sum_shape": [5, -1]}, ValueError, "['sum_shape']: shape=(5, -1) has a negative"),
}
WRONG_ROWS = {
    "order": ({"indices": np.array([4, 1])}, ValueError, "['indices'] must rise: [4 1]"),
    "twice": ({"indices": np.array([4, 4])}, ValueError, "['indices'] must rise: [4 4]"),
    "outside": ({"indices": np.array([1, 5])}, InvalidArgumentError, "[0]: indices[1] = 5 is not"),
    "floats": ({"indices": np.ones(2)}, TypeError, "partial_sums'][0]: indices must be integers"),
    "fewer": ({"indices": np.array([1])}, InvalidArgumentError, "[0]: 1 indices for 2 rows"),
    "shape": ({"values": np.ones((2, 4), "float32")}, InvalidArgumentError, "[0]: values of shape"),
    "rounded": ({"values": np.ones((2, 3), "float16")}, ValueError,
                "['values'] is float16, must be float32"),
    "list": ({"values": [[1.0] * 3] * 2}, ValueError, "['values'] is float64, must be float32"),
    "touches": ({"num_touches": np.ones(2)}, ValueError, "['num_touches'] must be an integer for"),
    "one": ({"num_touches": np.array([2])}, ValueError, "['num_touches'] must be an integer for"),
    "many": ({"num_touches": np.array([1, 3])}, ValueError, "must be from 1 to 2: [1 3]"),
    "none": ({"num_touches": np.array([0, 1])}, ValueError, "must be from 1 to 2: [0 1]"),
}  # fmt: skip


@pytest.mark.parametrize("what", [*WRONG, *WRONG_ROWS])
def test_what_is_refused_changes_nothing(device, what):
    acc = gr.SparseConditionalAccumulator("float16", (5, None), device=device)
    good = acc.state_dict() | {"num_accumulated": 2, "sum_shape": [5, 3], "kind": "native"}
    good["partial_sums"] = [ROWS]
    change, error, text = (WRONG | WRONG_ROWS)[what]
    if what in WRONG_ROWS:
        change = {"partial_sums": [ROWS | change]}
    check_refused(acc, good | change, error, text)
    acc.load_state_dict(good)
    check_refused(acc, good | change, error, text)
    assert acc.take_grad(2)[1].tolist() == [[1.0] * 3, [0.5] * 3]


def test_no_accumulator_takes_the_state_of_the_other_kind(device):
    dense = gr.ConditionalAccumulator("float16", device=device)
    sparse = gr.SparseConditionalAccumulator("float16", device=device)
    for acc, other in ((dense, sparse), (sparse, dense)):
        check_refused(acc, other.state_dict(), ValueError, "state['format'] is 'gradreduce")
