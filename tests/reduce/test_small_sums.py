"""Small host arrays are added without Buffers, with the same bits, records and errors."""

import warnings
from functools import partial

import numpy as np
import pytest
from support.exact_data import DTYPES, finite_data, same

import gradreduce as gr
from gradreduce import ops
from gradreduce.errors import BackendUnavailableError
from gradreduce.ops.add_n import SMALL

CALLS = {
    "add_n": gr.add_n,
    "accumulate_n": gr.accumulate_n,
    "aggregate": partial(gr.aggregate, method=0),
    "aggregate in one buffer": partial(gr.aggregate, method=2),
}


@pytest.fixture
def mesh(monkeypatch):
    with gr.open_mesh(2, backend="sim", strict=False) as made:
        monkeypatch.setattr("gradreduce.arrays.replica_context.default_mesh", lambda: made)
        yield made


@pytest.fixture
def fast_path(monkeypatch):
    """Records for each sum whether it was made without Buffers."""
    taken = []
    usual = ops.add_on_host

    def watched(terms, device):
        made = usual(terms, device)
        taken.append(made is not None)
        return made

    monkeypatch.setattr(ops, "add_on_host", watched)
    return taken


def terms_of(dtype, shape, count=5):
    return [np.asarray(finite_data(shape, dtype, seed=seed)) for seed in range(count)]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (SMALL,)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_and_the_record_are_those_of_a_launch(mesh, fast_path, dtype, shape, call):
    terms = terms_of(dtype, shape)
    before = [term.copy() for term in terms]
    with mesh.journal() as journal:
        made = call(terms)
    assert fast_path == [True]
    usual = gr.add_n([mesh.devices[0].put(term) for term in terms]).numpy()
    assert same(made, usual)
    assert [(record.kind, record.name, record.num_rows) for record in journal.records] == [
        ("launch", "add_n", 1)
    ]
    assert all(map(same, terms, before))
    assert made.flags.writeable
    assert not any(np.may_share_memory(made, term) for term in terms)


USUAL = {
    "large": lambda: terms_of("float32", (SMALL + 1,)),
    "empty": lambda: terms_of("float32", (0, 3)),
    "not contiguous": lambda: [term[::2] for term in terms_of("float32", (20,))],
    "of Fortran's order": lambda: [np.asfortranarray(t) for t in terms_of("float32", (4, 5))],
    "numbers": lambda: [1.0, 2.0, 3.0],
    "lists": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "of a subclass": lambda: [t.view(np.matrix) for t in terms_of("float32", (2, 2))],
    "misaligned": lambda: [np.zeros(41, np.uint8)[1:].view(np.float32) for _ in range(3)],
}


@pytest.mark.parametrize("case", USUAL)
def test_all_other_sums_use_the_general_path(mesh, fast_path, case):
    terms = USUAL[case]()
    made = gr.add_n(terms)
    assert fast_path == [False]
    assert same(
        np.asarray(made), np.asarray(sum(np.asarray(t) for t in terms), np.asarray(made).dtype)
    )


@pytest.mark.parametrize("options", [{"strict": True}, {"schedule_seed": 3}])
def test_watched_and_deferred_work_uses_the_general_path(monkeypatch, fast_path, options):
    with gr.open_mesh(1, backend="sim", **options) as mesh:
        monkeypatch.setattr("gradreduce.arrays.replica_context.default_mesh", lambda: mesh)
        assert same(gr.add_n([np.ones(3)] * 3), np.full(3, 3.0))
    assert fast_path == [False]


def test_a_tree_does_not_add_from_left_to_right(mesh, fast_path):
    big = np.float32(2.0**24)
    terms = [np.array([value], np.float32) for value in (big, 1, 1, 1)]
    assert gr.aggregate(terms, method=1)[0] == big + 2
    assert gr.add_n(terms)[0] == big
    assert fast_path == [True]


def test_the_launch_is_that_of_the_replica(mesh):
    with mesh.journal() as journal, gr.replica(1):
        gr.add_n([np.ones(3), np.ones(3)])
    assert [record.device for record in journal.records] == [1]
    with pytest.raises(ValueError, match="replica 2: the mesh has 2"), gr.replica(2):
        gr.add_n([np.ones(3), np.ones(3)])


def test_overflow_and_nan_do_not_warn(mesh, fast_path):
    terms = [np.array([3e38, np.inf, np.nan], np.float32), np.array([3e38, -np.inf, 1], np.float32)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = gr.add_n(terms)
    assert same(made, np.array([np.inf, np.nan, np.nan], np.float32))
    assert fast_path == [True]


def test_a_closed_or_failed_device_adds_nothing(mesh):
    mesh.devices[1].mark_failed("tested")
    with pytest.raises(BackendUnavailableError, match="sim:1 failed"), gr.replica(1):
        gr.add_n([np.ones(3), np.ones(3)])
    mesh.close()
    with pytest.raises(BackendUnavailableError, match="closed"):
        gr.add_n([np.ones(3), np.ones(3)])
