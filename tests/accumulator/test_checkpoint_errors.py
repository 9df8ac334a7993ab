"""What is no state of this accumulator, or comes at the wrong time, changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from support.accumulator_states import EMPTY, check_refused, frozen
from support.exact_data import same

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, CancelledError

TOTAL = np.array([[1.0, np.nan]], "float32")
FILLED = {"num_accumulated": 2, "sum_shape": [1, 2], "kind": "native", "partial_sums": [TOTAL]}
WRONG = {
    "format": ({"format": "2"}, ValueError, "is '2'; expected 'gradreduce dense accumulator 1'"),
    "dtype": ({"dtype": "float32"}, ValueError, "is 'float32'; the accumulator has 'float16'"),
    "no dtype": ({"dtype": 16}, TypeError, "['dtype']=16 must be a string"),
    "reduction": ({"reduction_type": "MEAN"}, ValueError, "['reduction_type'] is 'MEAN'; the"),
    "shape": ({"shape": [2, 2]}, ValueError, "['shape'] is (2, 2); the accumulator has (None, 2)"),
    "any shape": ({"shape": None}, ValueError, "['shape'] is None; the accumulator has (None, 2)"),
    "no shape": ({"shape": "12"}, TypeError, "['shape']='12' must be a list of extents or None"),
    "less": ({"shape": [-1, 2]}, ValueError, "['shape']: shape=(-1, 2) has a negative extent"),
    "step": ({"global_step": 1.0}, TypeError, "['global_step']=1.0 must be an integer"),
    "no count": ({"num_accumulated": None}, TypeError, "['num_accumulated']=None must be an"),
    "count": ({"num_accumulated": -1}, ValueError, "['num_accumulated']=-1 must not be negative"),
    "dropped": ({"num_dropped": -2}, ValueError, "['num_dropped']=-2 must not be negative"),
    "alien sum": ({"sum_shape": [1, 3]}, ValueError, "['sum_shape'] is (1, 3), which does not fit"),
    "open sum": ({"sum_shape": [None, 2]}, ValueError, "['sum_shape'] is (None, 2), which does"),
    "no sum": ({"sum_shape": None}, ValueError, "['sum_shape'] is missing, because"),
    "no kind": ({"kind": None}, ValueError, "['kind'] is missing, because"),
    "kind": ({"kind": "list"}, ValueError, "['kind']='list' is not one of"),
    "empty": ({"num_accumulated": 0}, ValueError, "['sum_shape'] must be empty, because"),
    "nothing": ({"partial_sums": [None]}, ValueError, "['partial_sums'] is missing, because"),
    "an array": ({"partial_sums": TOTAL}, TypeError, "['partial_sums'] is a ndarray; expected a"),
    "devices": ({"partial_sums": [TOTAL] * 3}, ValueError, "has 3 entries; the accumulator is"),
    "a list": ({"partial_sums": [[[1.0, 2.0]]]}, TypeError, "['partial_sums'][0] is a list; expec"),
    "rounded": ({"partial_sums": [TOTAL.astype("float16")]}, ValueError,
                "['partial_sums'][0] is float16(1, 2); expected float32(1, 2)"),
    "other": ({"partial_sums": [TOTAL[:, :1]]}, ValueError, "(1, 1); expected float32(1, 2)"),
    "swapped": ({"partial_sums": [TOTAL.astype(">f4")]}, TypeError, "sums'][0]: dtype >f4"),
    "unknown": ({"stale": 1}, KeyError, "from state_dict(): 'stale' unknown"),
}  # fmt: skip


@pytest.fixture
def filled(accumulator):
    acc = accumulator("float16", (None, 2), reduction_type="SUM")
    acc.set_global_step(3)
    acc.apply_grad([[7.0, 8.0]], 3)
    return acc


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused_changes_nothing(filled, what):
    change, error, text = WRONG[what]
    check_refused(filled, EMPTY | FILLED | change, error, text)


def test_what_is_missing_is_named(filled):
    for key in EMPTY:
        state = EMPTY | FILLED
        del state[key]
        check_refused(filled, state, KeyError, f"from state_dict(): {key!r} missing")
    check_refused(filled, [EMPTY], TypeError, "state is a list; expected a dict from state_dict()")
    filled.load_state_dict(EMPTY | FILLED)
    assert same(filled.take_grad(2), TOTAL.astype("float16")), "a NaN is a sum as good as any"


def test_sums_that_fit_neither_count_nor_shape(mesh):
    acc = gr.ConditionalAccumulator("float32", device=mesh)
    acc.apply_grad(gr.PerReplica([[1.0]] * len(mesh), mesh), cast=True)
    state = acc.state_dict() | {"num_accumulated": len(mesh) - 1}
    check_refused(acc, state, ValueError, f"has {len(mesh)} sums, but state['num_acc")
    state = acc.state_dict() | {"sum_shape": [None, 1]}
    check_refused(acc, state, ValueError, "is (None, 1), which does not fit the")


def fill_dense(source, acc, mesh):
    source.apply_grad(gr.PerReplica([[2.0]] * len(mesh), mesh), cast=True)
    acc.apply_grad([5.0, 6.0])


def fill_sparse(source, acc, mesh):
    rows = np.ones((2, 1), "float16")
    given = [gr.IndexedSlices(rows, [3, place]) for place in range(len(mesh))]
    source.apply_indexed_slices_grad(gr.PerReplica(given, mesh))
    acc.apply_grad([5], [[6.0]])


@pytest.mark.parametrize(
    ("kind", "fill"),
    [(gr.ConditionalAccumulator, fill_dense), (gr.SparseConditionalAccumulator, fill_sparse)],
    ids=["dense", "sparse"],
)
@pytest.mark.parametrize(
    ("method", "name"),
    [("_allocate", "load"), ("_upload", "load"), ("_allocate", "save"), ("_copy", "save")],
)
def test_a_failure_changes_nothing(mesh, monkeypatch, method, name, kind, fill):
    acc, source = (kind("float16", device=mesh) for _ in range(2))
    fill(source, acc, mesh)
    state, before = source.state_dict(), [frozen(acc), frozen(source)]
    calls = {"load": lambda: acc.load_state_dict(state), "save": source.state_dict}

    def failing(*args):
        raise MemoryError(method)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match=method):
        patch.setattr(mesh.devices[-1], method, failing)  # when those before it have theirs
        calls[name]()
    assert [frozen(acc), frozen(source)] == before
    calls[name]()


def test_what_is_closed_says_so(accumulator):
    acc = accumulator()
    state = acc.state_dict()
    acc.close()
    for call in (acc.state_dict, lambda: acc.load_state_dict(state)):
        with pytest.raises(CancelledError, match=r"^the accumulator '\w+' was closed$"):
            call()
    with gr.open_mesh(1, backend="sim") as mesh:
        acc = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
    for call in (acc.state_dict, lambda: acc.load_state_dict(state)):
        with pytest.raises(BackendUnavailableError, match="was closed"):
            call()
