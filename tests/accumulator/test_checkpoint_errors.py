"""An invalid state, or a load at the wrong time, changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from support.accumulator_states import EMPTY, check_refused, frozen
from support.exact_data import same

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, CancelledError

TOTAL = np.array([[1.0, np.nan]], "float32")
FILLED = {"num_accumulated": 2, "sum_shape": [1, 2], "kind": "native", "partial_sums": [TOTAL]}
# Cases in addition to those that tests/test_checkpoint.py has for every class.
WRONG = {
    "any shape": ({"shape": None}, ValueError, "['shape'] is None; expected [None, 2]"),
    "no shape": ({"shape": "12"}, ValueError, "['shape'] is '12'; expected [None, 2]"),
    "alien sum": ({"sum_shape": [1, 3]}, ValueError, "['sum_shape'] is [1, 3], which does not fit"),
    "open sum": ({"sum_shape": [-1, 2]}, ValueError, "['sum_shape'] is [-1, 2], which does"),
    "unknown sum": ({"sum_shape": [1, None]}, TypeError, "['sum_shape'][1]=None must be an int"),
    "no sum": ({"sum_shape": None}, TypeError, "['sum_shape'] is a NoneType; expected a list"),
    "kind": ({"kind": "list"}, ValueError, "['kind']: output_type='list' is not one of"),
    "kinds": ({"kind": []}, ValueError, "['kind']: output_type=[] is not one of"),
    "empty": ({"num_accumulated": 0}, ValueError, "['sum_shape'] is [1, 2]; expected None"),
    "nothing": ({"partial_sums": [None]}, ValueError, "has 0 sums, but state['num_accumulated']=2"),
    "an array": ({"partial_sums": TOTAL}, TypeError, "['partial_sums'] is a ndarray; expected a"),
    "devices": ({"partial_sums": [TOTAL] * 3}, ValueError, "has 3 entries; expected 1"),
}


@pytest.fixture
def filled(accumulator):
    acc = accumulator("float16", (None, 2), reduction_type="SUM")
    acc.set_global_step(3)
    acc.apply_grad([[7.0, 8.0]], 3)
    return acc


@pytest.mark.parametrize("what", WRONG)
def test_a_refused_state_changes_nothing(filled, what):
    change, error, text = WRONG[what]
    check_refused(filled, EMPTY | FILLED | change, error, text)


def test_a_sum_may_have_nan(filled):
    filled.load_state_dict(EMPTY | FILLED)
    assert same(filled.take_grad(2), TOTAL.astype("float16"))


def test_sums_that_fit_neither_count_nor_shape(mesh):
    acc = gr.ConditionalAccumulator("float32", device=mesh)
    acc.apply_grad(gr.PerReplica([[1.0]] * len(mesh), mesh), cast=True)
    state = acc.state_dict() | {"num_accumulated": len(mesh) - 1}
    check_refused(acc, state, ValueError, f"has {len(mesh)} sums, but state['num_acc")
    state = acc.state_dict() | {"sum_shape": [-1, 1]}
    check_refused(acc, state, ValueError, "is [-1, 1], which does not fit the")


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
        patch.setattr(mesh.devices[-1], method, failing)  # after the other devices have memory
        calls[name]()
    assert [frozen(acc), frozen(source)] == before
    calls[name]()


def test_a_closed_accumulator_or_mesh_raises(accumulator):
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
