"""SyncStep with a weight for each replica and micro-batch: one batch, in any layout."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import same
from support.exhaustive import examples
from support.thread_group import run_replicas

import gradreduce as gr

SHAPES = {"w": (5,), "b": (2, 3), "rows": (4, 2)}
# Of the processes. The first example has two, because each simplest value is the first.
COUNTS = st.lists(st.integers(1, 3), min_size=2, max_size=3) | st.sampled_from([[1], [3]])
OPTIONS = {
    "plain": {},
    "shards": {"shard_optimizer": True},
    "tree": {"aggregation_method": gr.AggregationMethod.EXPERIMENTAL_TREE},
    "checked": {"check_finite": True},
    "clipped": {"clip_norm": 1e9},
    "two calls": {"num_required": 2},
}


def gradient(rng, name, weight):
    """Small whole numbers, whose sums are exact; nothing that can be read if the weight is 0."""
    values = rng.integers(-5, 6, SHAPES[name]).astype("float32")
    if not weight:
        return None if name == "b" else values * np.float32(np.nan)
    return gr.IndexedSlices(values[:2], [3, 1], SHAPES[name]) if name == "rows" else values


def total_of(grads, weights, name):
    total = np.zeros(SHAPES[name], "float32")
    for grad, weight in zip(chain(*grads), chain(*weights), strict=True):
        if weight:
            each = grad[name]
            total += np.float32(weight) * (each.to_dense() if name == "rows" else each)
    return total


@pytest.mark.parametrize("option", OPTIONS)
@settings(max_examples=examples(8), deadline=None)
@given(st.data())
def test_a_step_is_that_of_one_batch_on_every_layout(option, data):
    counts = data.draw(COUNTS, "replicas")
    options = dict(OPTIONS[option])
    num_calls = options.pop("num_required", 1)
    n, rng = sum(counts), np.random.default_rng(0)
    of_one = st.lists(st.sampled_from([2, 0, 1, 3, 0.5]), min_size=1, max_size=3)
    calls = []
    for _ in range(num_calls):
        weights = data.draw(st.lists(of_one, min_size=n, max_size=n), "weights")
        weights[0][0] = weights[0][0] or 4
        grads = [
            [{name: gradient(rng, name, weight) for name in SHAPES} for weight in row]
            for row in weights
        ]
        calls.append((grads, weights))

    def work(mesh, replicas):
        variables = [
            gr.Variable(np.zeros(SHAPES[name], "f4"), name, device=mesh) for name in SHAPES
        ]
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        options["num_required"] = num_calls * mesh.num_replicas
        step = gr.SyncStep(
            variables, gr.GradientDescentOptimizer(1.0), ops, sparse_variables=variables[2:],
            **options,
        )  # fmt: skip
        own = slice(replicas.start, replicas.stop)
        for number, (grads, weights) in enumerate(calls, 1):
            terms = [
                {name: [each[name] for each in row] for name in SHAPES} if any(of_row) else None
                for row, of_row in zip(grads[own], weights[own], strict=True)
            ]
            assert step(terms, weights=weights[own]) is (number == num_calls)
        return [[variable.numpy() for variable in variables]]

    weight = np.float32(sum(sum(map(sum, weights)) for _, weights in calls))
    for row in chain(*run_replicas(counts, work)):
        for name, found in zip(SHAPES, row, strict=True):
            total = sum(total_of(*call, name) for call in calls)
            assert same(found, np.float32(0) - total / weight), name


def made(mesh, **options):
    w = gr.Variable(np.zeros(3, "float32"), "w", device=mesh)
    return w, gr.SyncStep([w], gr.GradientDescentOptimizer(1.0), gr.NcclAllReduce(), **options)


@pytest.fixture
def mesh():
    with gr.open_mesh(2, backend="sim", strict=True) as mesh:
        yield mesh


def test_weights_of_1_make_the_same_step(mesh):
    grads = [[[np.float32([1, 2, 3])]], [[np.float32([0.1, 5, 7])]]]
    logs, values = [], []
    for options in ({}, {"weights": [1, [1.0]]}):
        w, step = made(mesh)
        with mesh.journal() as journal:
            assert step(grads, **options)
        logs.append([(each.kind, each.name) for each in journal.records])
        values.append(w.numpy())
    assert logs[0] == logs[1]
    assert same(*values)


def test_an_unfinished_update_is_saved_with_its_weights(mesh):
    ones = [[[np.ones(3, "float32")]]] * 2
    _, step = made(mesh, num_required=4)
    assert not step(ones, weights=[5, 1])
    state = step.state_dict()
    assert state["accumulators"]["w"]["weight"] == [6.0]
    other, again = made(mesh, num_required=4)
    again.load_state_dict(state)
    twos = [[[np.full(3, 3, "float32")]]] * 2
    assert again(twos, weights=[0, 2])
    assert same(other.numpy(), np.full(3, -1.5, "float32"))


WRONG = [
    (3, TypeError, "weights=3 must be a list with one entry per device"),
    ([1], ValueError, "weights has 1 entries; expected 2, one per device"),
    ([1, [1, 2]], ValueError, "terms of replica 1 for 'w': 1 gradients have 2 weights"),
    ([1, []], ValueError, "weights[1] is empty: pass a number for each micro-batch"),
    ([1, [-1]], ValueError, "weights[1][0]=-1 must be a finite number of at least 0"),
    ([None, 1], TypeError, "weights[0]=None must be a number on the host, of at least 0"),
    (
        [0, [0]], ValueError,
        "the sum of all weights is 0: at least one gradient must have a weight",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "kind", "message"), WRONG)
def test_wrong_weights_change_nothing(mesh, weights, kind, message):
    w, step = made(mesh)
    with pytest.raises(kind) as caught:
        step([[[np.ones(3, "float32")]]] * 2, weights=weights)
    assert str(caught.value) == message
    assert (step.global_step, step.accumulators[0].num_accumulated()) == (0, 0)
    assert same(w.numpy(), np.zeros(3, "float32"))


def test_a_stale_step_ignores_its_weights(mesh):
    w, step = made(mesh)
    ones = [[[np.ones(3, "float32")]]] * 2
    step(ones)
    assert not step(ones, local_step=0, weights=[1000, 0])
    assert step(ones, weights=[3, 1])
    assert same(w.numpy(), np.full(3, -2, "float32"))


def test_all_processes_pass_weights_or_none():
    def work(mesh, replicas):
        _, step = made(mesh)
        with pytest.raises((ValueError, gr.errors.CollectiveError)) as caught:
            step([[[np.ones(3, "float32")]]], **({"weights": [2]} if replicas.start else {}))
        return str(caught.value)

    assert any("True in process 1" in each for each in run_replicas([1, 1], work))


def test_a_state_is_saved_while_a_replica_has_read_nothing():
    """Of dense and of sparse sums, over one process and two; some micro-batches are together."""
    rows = gr.IndexedSlices(np.ones((1, 2), "float32"), [1], (3, 2))

    def work(mesh, replicas):
        w = gr.Variable(np.zeros(2, "float32"), "w", device=mesh)
        table = gr.Variable(np.zeros((3, 2), "float32"), "table", device=mesh)
        step = gr.SyncStep(
            [w, table], gr.GradientDescentOptimizer(1.0), gr.AllReduceCrossDeviceOps(mesh=mesh),
            sparse_variables=[table], num_required=4,
        )  # fmt: skip
        of_one = [[np.ones(2, "float32")] * 3, [rows] * 3]
        own = slice(replicas.start, replicas.stop)
        assert not step([of_one, None][own], weights=[[1, 2, 3], [0, 0, 0]][own])
        state = step.state_dict()
        step.load_state_dict(state)
        assert step([None, of_one][own], weights=[[0, 0, 0], [2, 2, 2]][own])
        return w.numpy(), table.numpy()

    for counts in ([2], [1, 1]):
        for found, rows_of in run_replicas(counts, work):
            assert same(found, np.full(2, -1, "float32"))
            assert same(rows_of, np.float32([[0, 0], [-1, -1], [0, 0]]))


def test_a_call_that_reads_nothing_leaves_other_variables_alone(mesh):
    w = [gr.Variable(np.zeros(1, "float32"), name, device=mesh) for name in "ab"]
    step = gr.SyncStep(w, gr.GradientDescentOptimizer(1.0), gr.NcclAllReduce(), num_required=4)
    assert not step([[[np.ones(1, "float32")], None]] * 2, weights=[3, 1])
    assert step([None, None], weights=[0, 0])
    assert [each.numpy().tolist() for each in w] == [[-1], [0]]
