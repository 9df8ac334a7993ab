"""Saving and loading the state of a sparse accumulator, and invalid states."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from support.accumulator_states import EMPTY, check_refused, frozen
from support.exact_data import FLOATS, random_data, same

import gradreduce as gr
from gradreduce.device import accumulate_dtype

FORMAT = "gradreduce sparse accumulator 1"


@pytest.fixture
def sparse(device):
    def make(dtype="float32", shape=None, **options):
        return gr.SparseConditionalAccumulator(dtype, shape, device=device, **options)

    return make


def gradient(seed, dtype, row=(5,)):
    """A gradient with indices in any order, some twice; sometimes without rows."""
    luck = np.random.default_rng(seed)
    indices = luck.integers(0, 12, luck.integers(0, 9))
    return gr.IndexedSlices(random_data((len(indices), *row), dtype, seed=seed), indices)


def apply_and_take(acc, gradients, step):
    """Adds more gradients of one step and takes, twice; returns the results as one list."""
    made = []
    for turn in range(2):
        for each in gradients:
            assert acc.apply_indexed_slices_grad(each, step + turn)
        taken = acc.take_indexed_slices_grad(1, output_type="numpy")
        parts = taken.values if isinstance(taken, gr.Mirrored) else [taken]
        made += [(part.indices, part.values, part.dense_shape) for part in parts]
    return made


def check_continues(acc, fresh, gradients, step=0):
    pairs = zip(
        apply_and_take(fresh, gradients, step), apply_and_take(acc, gradients, step), strict=True
    )
    for (indices, values, shape), (wanted, rows, wanted_shape) in pairs:
        assert same(indices, wanted)
        assert same(values, rows)
        assert shape == wanted_shape


# -- what it is -----------------------------------------------------------------------------------


def test_the_keys_and_their_types(sparse, device):
    """Rows are in the order of their indices, in whatever order they were added."""
    acc = sparse("float16", (None, 2), reduction_type="SUM")
    empty = EMPTY | {"format": FORMAT, "sparse_mean": "per_row"}
    assert acc.state_dict() == empty
    acc.set_global_step(3)
    large, tiny = np.full((1, 2), 60000, "float16"), np.full((1, 2), 2.0**-24, "float16")
    acc.apply_grad([7], large, (9, 2), 3)
    acc.apply_grad([4, 7], np.concatenate([tiny, large]), None, 3)
    acc.apply_grad([4, 4], np.concatenate([tiny, tiny]), None, 5)
    assert not acc.apply_grad([4], tiny, None, 2)
    device.drain()
    live = device._pool.live_bytes
    state = acc.state_dict()
    device.drain()
    assert device._pool.live_bytes == live
    (total,) = state.pop("partial_sums")
    counted = {"global_step": 3, "num_accumulated": 3, "num_dropped": 1}
    assert state | {"partial_sums": [None]} == empty | counted | {
        "sum_shape": [9, 2],
        "kind": "native",
    }
    assert json.loads(json.dumps(state)) == state
    assert set(total) == {"indices", "num_touches", "values"}
    assert same(total["indices"], np.array([4, 7]))
    assert same(total["num_touches"], np.array([2, 2]))
    assert same(total["values"], np.array([[3 * 2.0**-24] * 2, [120000] * 2], "float32"))
    for array in total.values():
        array[:] = 0
    indices, values, shape = acc.take_grad(3)
    assert (indices.tolist(), shape) == ([4, 7], (9, 2)), "the arrays are copies"
    assert values.tolist() == [[3 * 2.0**-24] * 2, [np.inf] * 2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
@pytest.mark.parametrize("row", [(), (5,), (0, 3)], ids=str)
def test_a_restored_accumulator_continues_with_the_same_bits(sparse, dtype, reduction_type, row):
    acc, fresh = (sparse(dtype, reduction_type=reduction_type) for _ in range(2))
    given = [gradient(seed, dtype, row) for seed in range(8)]
    acc.set_global_step(4)
    for each in given[:4]:
        acc.apply_indexed_slices_grad(each, 4)
    acc.apply_indexed_slices_grad(given[4], 3)
    state = acc.state_dict()
    before = pickle.dumps(state)
    fresh.apply_indexed_slices_grad(given[5], 0)  # replaced by the load
    fresh.load_state_dict(state)
    assert frozen(fresh) == frozen(acc)
    assert state["partial_sums"][0]["values"].dtype == accumulate_dtype(dtype)
    check_continues(acc, fresh, given[4:], 4)
    assert pickle.dumps(state) == before, "the caller's arrays were written"


def test_the_gradient_counts_of_all_rows_are_saved(sparse):
    """More than are counted together; gradients after the load are counted in addition."""
    acc, fresh = sparse(), sparse()
    for turn in range(70):
        acc.apply_grad([turn % 2, 2], np.ones((2, 1), "float32"))
    state = acc.state_dict()
    assert state["partial_sums"][0]["num_touches"].tolist() == [35, 35, 70]
    fresh.load_state_dict(state)
    for _ in range(70):
        fresh.apply_grad([0, 3], np.full((2, 1), 4, "float32"))
    indices, values, _ = fresh.take_grad(140)
    assert indices.tolist() == [0, 1, 2, 3]
    assert values.tolist() == [[3.0], [1.0], [1.0], [4.0]]


def test_over_a_mesh_with_any_number_of_devices_filled(mesh):
    everyone, dtype = range(len(mesh)), "bfloat16"
    given = [gradient(seed, dtype) for seed in range(1, 1 + 2 * len(mesh))]
    for filled in ((), everyone[1:2], everyone[1:], everyone):
        acc, fresh = (gr.SparseConditionalAccumulator(dtype, device=mesh) for _ in range(2))
        for place in filled:
            with gr.replica(place):
                acc.apply_indexed_slices_grad(given[place])
        with mesh.journal() as journal:
            state = acc.state_dict()
        num_sums = sum(total is not None for total in acc.accumulator_ref.totals)
        with_rows = sum(len(given[place].indices) > 0 for place in filled)
        assert (journal.copies, journal.launches, journal.uploads) == (with_rows, 0, 0)
        assert [total is not None for total in state["partial_sums"]] == [
            place in filled for place in everyone
        ]
        with mesh.journal() as journal:
            fresh.load_state_dict(state)
        assert (journal.copies, journal.launches, journal.uploads) == (0, 0, with_rows)
        assert num_sums == len(filled)
        assert frozen(fresh) == frozen(acc)
        check_continues(acc, fresh, [gr.PerReplica(given[len(mesh) :], mesh)])


def test_gradients_without_rows(sparse):
    acc, fresh = sparse(shape=(None, 3)), sparse(shape=(None, 3))
    for _ in range(2):
        acc.apply_grad([], np.empty((0, 3), "float32"), (6, 3))
    state = acc.state_dict()
    (total,) = state["partial_sums"]
    assert [total[key].shape for key in ("indices", "num_touches", "values")] == [
        (0,),
        (0,),
        (0, 3),
    ]
    fresh.load_state_dict(state)
    fresh.apply_grad([5], np.ones((1, 3), "float32"))
    indices, values, shape = fresh.take_grad(3)
    assert (indices.tolist(), values.tolist(), shape) == ([5], [[1.0] * 3], (6, 3))
    fresh.load_state_dict(state)
    taken = fresh.take_indexed_slices_grad(2)
    assert (taken.indices.size, taken.values.shape, taken.dense_shape) == (0, (0, 3), (6, 3))


def test_a_load_completes_waiting_takes(sparse, accumulator, call_threads):
    acc, other, source = sparse(), accumulator(), sparse()
    for value in (1.0, 3.0):
        source.apply_grad([2], [[value]])
        other.apply_grad([value])
    joint = call_threads.waiting(gr.take_grads, [acc, other], 2)
    acc.load_state_dict(source.state_dict())
    slices, array = joint.result()
    assert (slices.values.tolist(), array.tolist()) == ([[2.0]], [2.0])


# -- what is none ---------------------------------------------------------------------------------

ROWS = np.array([[1.0, np.nan], [2.0, 3.0]], "float32")
TOTAL = {"indices": np.array([1, 4]), "num_touches": np.array([1, 2]), "values": ROWS}
FILLED = EMPTY | {
    "format": FORMAT,
    "num_accumulated": 2,
    "sum_shape": [9, 2],
    "kind": "native",
    "partial_sums": [TOTAL],
}
SUM = "state['partial_sums'][0]"


def with_sum(**changed):
    return {"partial_sums": [TOTAL | changed]}


WRONG = {
    "shorter": ({"sum_shape": [9]} | with_sum(values=ROWS[:, 0]), ValueError,
                "['sum_shape'] is [9], which does not fit the accumulator's shape"),
    "scalar": ({"sum_shape": []}, ValueError, "['sum_shape'] is [], which does not fit"),
    "other rows": ({"sum_shape": [9, 3]}, ValueError, "['sum_shape'] is [9, 3], which does not"),
    "unknown rows": ({"sum_shape": [9, -1]}, ValueError, "['sum_shape'] is [9, -1], which does"),
    "negative": ({"sum_shape": [-2, 2]}, ValueError, "['sum_shape'][0]=-2 must be at least -1"),
    "an array": ({"partial_sums": [ROWS]}, TypeError, f"{SUM} is a ndarray; expected a dict"),
    "missing": ({"partial_sums": [{"indices": [1], "values": ROWS}]}, KeyError,
                f"{SUM} has wrong keys: 'num_touches' missing"),
    "unknown": (with_sum(more=1), KeyError,
                f"{SUM} has wrong keys: 'more' unknown"),
    "falling": (with_sum(indices=np.array([4, 1])), ValueError, f"{SUM}['indices'] must be str"),
    "twice": (with_sum(indices=np.array([4, 4])), ValueError, f"{SUM}['indices'] must be str"),
    "less than 0": (with_sum(indices=np.array([-1, 4])), ValueError,
                    f"{SUM}['indices'] must be from 0 to 8, got [-1  4]"),
    "too large": (with_sum(indices=np.array([1, 9])), ValueError,
                  f"{SUM}['indices'] must be from 0 to 8, got [1 9]"),
    "fewer": (with_sum(indices=np.array([1])), ValueError,
              f"{SUM}['num_touches'] is int64(2,); expected int64(1,)"),
    "a matrix": (with_sum(indices=np.array([[1, 4]])), ValueError,
                 f"{SUM}['indices'] is int64(1, 2); expected int64(1,)"),
    "wide rows": (with_sum(values=np.ones((2, 3), "float32")), ValueError,
                  f"{SUM}['values'] is float32(2, 3); expected float32(2, 2)"),
    "not touched": (with_sum(num_touches=np.array([0, 2])), ValueError,
                    f"{SUM}['num_touches'] must be from 1 to 2, got [0 2]"),
    "touched too often": (with_sum(num_touches=np.array([1, 3])), ValueError,
                          f"{SUM}['num_touches'] must be from 1 to 2, got [1 3]"),
    "devices": ({"partial_sums": [TOTAL, None]}, ValueError, "has 2 entries; expected 1"),
}  # fmt: skip


@pytest.fixture
def filled(sparse):
    acc = sparse("float16", (None, 2), reduction_type="SUM")
    acc.set_global_step(3)
    acc.apply_grad([5, 1], [[7.0, 8.0], [9.0, 10.0]], (6, 2), 3)
    return acc


@pytest.mark.parametrize("what", WRONG)
def test_a_refused_state_changes_nothing(filled, what):
    change, error, text = WRONG[what]
    check_refused(filled, FILLED | change, error, text)


def test_a_valid_state_is_loaded(filled):
    filled.load_state_dict(FILLED)
    filled.load_state_dict(FILLED | {"sum_shape": [-1, 2]})
    taken = filled.take_indexed_slices_grad(2)
    assert (taken.indices.tolist(), taken.dense_shape) == ([1, 4], (-1, 2))
    assert same(taken.values, ROWS.astype("float16")), "a NaN is a sum as good as any"


def test_an_accumulator_with_a_known_shape_refuses_another(sparse):
    acc = sparse("float16", (9, 2), reduction_type="SUM")
    state = FILLED | {"shape": [9, 2]}
    for extent in (10, -1):
        text = f"state['sum_shape'] is [{extent}, 2], which does not fit the accumulator's shape [9"
        check_refused(acc, state | {"sum_shape": [extent, 2]}, ValueError, text)
    acc.load_state_dict(state)
    assert acc.take_indexed_slices_grad(1).dense_shape == (9, 2)
    acc = sparse("float16", reduction_type="SUM")
    for extents in ([9, -1], []):
        text = f"state['sum_shape'] is {extents}, which does not fit the accumulator's shape None"
        check_refused(acc, state | {"shape": None, "sum_shape": extents}, ValueError, text)


def test_dense_and_sparse_states_are_not_interchangeable(sparse, accumulator):
    acc, other = sparse(), accumulator()
    acc.apply_grad([1], [[2.0]])
    other.apply_grad([[2.0]])
    states = acc.state_dict(), other.state_dict()
    text = f"state['format'] is {EMPTY['format']!r}; expected {FORMAT!r}"
    check_refused(acc, states[1], ValueError, text)
    text = f"state['format'] is {FORMAT!r}; expected {EMPTY['format']!r}"
    check_refused(other, states[0], ValueError, text)
    # Also if only the name of the format differs.
    check_refused(acc, states[1] | {"format": FORMAT}, TypeError, f"{SUM} is a ndarray; expected a")
    same_format = states[0] | {"format": EMPTY["format"]}
    text = "state has wrong keys: 'sparse_mean' unknown"
    check_refused(other, same_format, KeyError, text)
    del same_format["sparse_mean"]
    text = "state['sum_shape'] is [-1, 1], which does not fit"
    check_refused(other, same_format, ValueError, text)


# -- sparse_mean ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse_mean", ["per_row", "per_gradient"])
def test_the_restored_mean_has_the_same_divisor(sparse, sparse_mean):
    acc, fresh = (sparse(sparse_mean=sparse_mean) for _ in range(2))
    acc.apply_grad([1, 4], [[2.0], [6.0]])
    acc.apply_grad([4], [[6.0]])
    state = acc.state_dict()
    assert state["sparse_mean"] == sparse_mean
    fresh.load_state_dict(state)
    assert frozen(fresh) == frozen(acc)
    for each in (acc, fresh):
        each.apply_grad([4], [[6.0]])  # after the load: the third gradient
        each.apply_grad([], np.empty((0, 1), "float32"))
    by = {"per_row": [1, 3], "per_gradient": [4, 4]}[sparse_mean]
    wanted = [[2.0 / by[0]], [18.0 / by[1]]]
    assert [each.take_grad(4)[1].tolist() for each in (acc, fresh)] == [wanted, wanted]


def test_a_state_of_the_other_mean_is_refused(sparse):
    kinds = "per_row", "per_gradient"
    made = {kind: sparse(sparse_mean=kind) for kind in kinds}
    for acc in made.values():
        acc.apply_grad([1, 4], [[2.0], [6.0]])
        acc.apply_grad([4], [[6.0]])
    for kind, other in (kinds, kinds[::-1]):
        text = f"state['sparse_mean'] is {other!r}; expected {kind!r}"
        check_refused(made[kind], made[other].state_dict(), ValueError, text)
        for wrong, shown in (("x", "'x'"), (None, "None"), (["per_row"], "['per_row']")):
            text = f"state['sparse_mean'] is {shown}; expected {kind!r}"
            state = made[kind].state_dict() | {"sparse_mean": wrong}
            check_refused(made[kind], state, ValueError, text)


def test_a_state_without_the_entry_is_per_row(sparse):
    """The entry is younger than the format."""
    acc, fresh, other = sparse(), sparse(), sparse(sparse_mean="per_gradient")
    acc.apply_grad([1, 4], [[2.0], [6.0]])
    acc.apply_grad([4], [[6.0]])
    state = acc.state_dict()
    del state["sparse_mean"]
    kept = list(state)
    fresh.load_state_dict(state)
    assert frozen(fresh) == frozen(acc)
    assert fresh.take_grad(2)[1].tolist() == [[2.0], [6.0]]
    text = "state['sparse_mean'] is 'per_row'; expected 'per_gradient'"
    check_refused(other, state, ValueError, text)
    assert list(state) == kept, "the caller's dict was changed"
