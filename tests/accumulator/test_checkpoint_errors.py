"""An invalid state, or a load at the wrong time, changes nothing."""

import numpy as np
import pytest
from accumulator.kinds import Dense, Sparse
from support.accumulator_states import EMPTY, EMPTY_SPARSE, check_refused, frozen
from support.exact_data import same

import gradreduce as gr

ARRAY = np.array([[1.0, np.nan]], "float32")
ROWS = np.array([[1.0, np.nan], [2.0, 3.0]], "float32")
TOTAL = {"indices": np.array([1, 4]), "num_touches": np.array([1, 2]), "values": ROWS}
COMMON = {"num_accumulated": 2, "kind": "native"}
FILLED = {
    Dense: EMPTY | COMMON | {"sum_shape": [1, 2], "partial_sums": [ARRAY]},
    Sparse: EMPTY_SPARSE | COMMON | {"sum_shape": [9, 2], "partial_sums": [TOTAL]},
}
SUM = "state['partial_sums'][0]"


def of_sum_shape(shape):
    return {"sum_shape": shape}, ValueError, f"['sum_shape'] is {shape}, which does not fit the acc"


def of_rows(error, text, **changed):
    return {"partial_sums": [TOTAL | changed]}, error, f"{SUM}{text}"


# Cases in addition to those that tests/test_checkpoint.py has for every class.
OF_DENSE = [
    ({"shape": None}, ValueError, "['shape'] is None; expected [None, 2]"),
    ({"shape": "12"}, ValueError, "['shape'] is '12'; expected [None, 2]"),
    of_sum_shape([1, 3]),
    of_sum_shape([-1, 2]),
    ({"sum_shape": [1, None]}, TypeError, "['sum_shape'][1]=None must be an int"),
    ({"sum_shape": None}, TypeError, "['sum_shape'] is a NoneType; expected a list"),
    ({"kind": "list"}, ValueError, "['kind']: output_type='list' is not one of"),
    ({"kind": []}, ValueError, "['kind']: output_type=[] is not one of"),
    ({"num_accumulated": 0}, ValueError, "['sum_shape'] is [1, 2]; expected None"),
    ({"num_accumulated": 0, "weight": [2.0]}, ValueError, "['weight']=[2.0] must be empty"),
    ({"partial_sums": [None]}, ValueError, "has 0 sums, but state['num_accumulated']=2"),
    ({"partial_sums": ARRAY}, TypeError, "['partial_sums'] is a ndarray; expected a"),
    ({"partial_sums": [ARRAY] * 3}, ValueError, "has 3 entries; expected 1"),
]
OF_SPARSE = [
    of_sum_shape([9]),
    of_sum_shape([]),
    of_sum_shape([9, 3]),
    of_sum_shape([9, -1]),
    ({"sum_shape": [-2, 2]}, ValueError, "['sum_shape'][0]=-2 must be at least -1"),
    ({"partial_sums": [ROWS]}, TypeError, f"{SUM} is a ndarray; expected a dict"),
    of_rows(ValueError, "['indices'] must be str", indices=np.array([4, 1])),
    of_rows(ValueError, "['indices'] must be str", indices=np.array([4, 4])),
    of_rows(ValueError, "['indices'] must be from 0 to 8, got [-1  4]", indices=np.array([-1, 4])),
    of_rows(ValueError, "['indices'] must be from 0 to 8, got [1 9]", indices=np.array([1, 9])),
    of_rows(ValueError, "['num_touches'] is int64(2,); expected int64(1,)", indices=np.array([1])),
    of_rows(ValueError, "['indices'] is int64(1, 2); expected int64(1,)",
            indices=np.array([[1, 4]])),
    of_rows(ValueError, "['values'] is float32(2, 3); expected float32(2, 2)",
            values=np.ones((2, 3), "float32")),
    of_rows(ValueError, "['num_touches'] must be from 1 to 2, got [0 2]",
            num_touches=np.array([0, 2])),
    of_rows(ValueError, "['num_touches'] must be from 1 to 2, got [1 3]",
            num_touches=np.array([1, 3])),
]  # fmt: skip


def filled(kind, device, shape=(None, 2)):
    acc = kind.make("float16", shape, reduction_type="SUM", device=device)
    acc.set_global_step(3)
    gr.apply_grads([acc], [[[7.0, 8.0]] if kind is Dense else kind.value(7.0, "float16")], 3)
    return acc


def test_a_refused_state_changes_nothing(device, kind):
    acc = filled(kind, device)
    for change, error, text in OF_DENSE if kind is Dense else OF_SPARSE:
        check_refused(acc, FILLED[kind] | change, error, text)


def test_a_sum_may_have_nan(device, kind):
    acc = filled(kind, device)
    acc.load_state_dict(FILLED[kind])
    (taken,) = gr.take_grads([acc], 2)
    if kind is Dense:
        assert same(taken, ARRAY.astype("float16"))
        return
    assert same(taken.values, ROWS.astype("float16"))
    acc.load_state_dict(FILLED[Sparse] | {"sum_shape": [-1, 2]})
    assert acc.take_indexed_slices_grad(2).dense_shape == (-1, 2)


def test_an_accumulator_with_a_known_shape_refuses_another(device):
    acc = filled(Sparse, device, (9, 2))
    state = FILLED[Sparse] | {"shape": [9, 2]}
    for extent in (10, -1):
        check_refused(acc, state | {"sum_shape": [extent, 2]}, *of_sum_shape([extent, 2])[1:])
    acc.load_state_dict(state)
    assert acc.take_indexed_slices_grad(1).dense_shape == (9, 2)
    acc = filled(Sparse, device, None)
    for extents in ([9, -1], []):
        change, *error = of_sum_shape(extents)
        check_refused(acc, state | {"shape": None} | change, *error)


def test_sums_that_fit_neither_count_nor_shape(mesh):
    acc = gr.ConditionalAccumulator("float32", device=mesh)
    acc.apply_grad(gr.PerReplica([[1.0]] * len(mesh), mesh), cast=True)
    state = acc.state_dict() | {"num_accumulated": len(mesh) - 1}
    check_refused(acc, state, ValueError, f"has {len(mesh)} sums, but state['num_acc")
    check_refused(acc, acc.state_dict() | {"sum_shape": [-1, 1]}, *of_sum_shape([-1, 1])[1:])


def test_dense_and_sparse_states_are_not_interchangeable(sparse, accumulator):
    acc, other = sparse(), accumulator()
    acc.apply_grad([1], [[2.0]])
    other.apply_grad([[2.0]])
    states = acc.state_dict(), other.state_dict()
    formats = {"format": states[0]["format"]}, {"format": states[1]["format"]}
    names = [repr(each["format"]) for each in formats]
    for made, state, (found, wanted) in ((acc, states[1], names[::-1]), (other, states[0], names)):
        check_refused(made, state, ValueError, f"state['format'] is {found}; expected {wanted}")
    # Also if only the name of the format differs.
    check_refused(acc, states[1] | formats[0], TypeError, f"{SUM} is a ndarray; expected a")
    text = "state has wrong keys: 'sparse_mean' unknown"
    same_format = states[0] | formats[1]
    check_refused(other, same_format, KeyError, text)
    del same_format["sparse_mean"]
    check_refused(other, same_format, *of_sum_shape([-1, 1])[1:])


@pytest.mark.parametrize("kind", ["per_row", "per_gradient"])
def test_a_state_of_the_other_mean_is_refused(sparse, kind):
    """The entry is younger than the format: a state without it is per_row."""
    other = {"per_row": "per_gradient", "per_gradient": "per_row"}[kind]
    acc, source = sparse(sparse_mean=kind), sparse(sparse_mean=other)
    source.apply_grad([1, 4], [[2.0], [6.0]])
    source.apply_grad([4], [[6.0]])
    state = source.state_dict()
    for wrong in (other, "x", None, ["per_row"]):
        text = f"state['sparse_mean'] is {wrong!r}; expected {kind!r}"
        check_refused(acc, state | {"sparse_mean": wrong}, ValueError, text)
    del state["sparse_mean"]
    kept = list(state)
    if kind == "per_row":
        acc.load_state_dict(state)
        assert frozen(acc)[1] == frozen(source)[1]
    else:
        text = "state['sparse_mean'] is 'per_row'; expected 'per_gradient'"
        check_refused(acc, state, ValueError, text)
    assert list(state) == kept, "the caller's dict was changed"


@pytest.mark.parametrize(
    ("method", "name"),
    [("_allocate", "load"), ("_upload", "load"), ("_allocate", "save"), ("_copy", "save")],
)
def test_a_failure_changes_nothing(mesh, monkeypatch, method, name, kind):
    acc, source = (kind.make("float16", device=mesh) for _ in range(2))
    given = [kind.value(place, "float16") for place in range(len(mesh))]
    gr.apply_grads([source], [gr.PerReplica(given, mesh)])
    gr.apply_grads([acc], [given[1]])
    state, before = source.state_dict(), [frozen(acc), frozen(source)]
    calls = {"load": lambda: acc.load_state_dict(state), "save": source.state_dict}

    def failing(*args):
        raise MemoryError(method)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match=method):
        patch.setattr(mesh.devices[-1], method, failing)  # after the other devices have memory
        calls[name]()
    assert [frozen(acc), frozen(source)] == before
    calls[name]()
