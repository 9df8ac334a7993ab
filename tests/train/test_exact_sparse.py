"""SyncStep(sparse_variables=) with exact sums: rows have the bits that the same arrays have."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.compiled_first import watched_compiles
from support.exact_sums import adversarial_terms, exact_means, fit_into
from support.exhaustive import examples
from support.thread_group import run_processes
from train import training

import gradreduce as gr
from gradreduce.errors import CollectiveError, InvalidArgumentError

SHAPES = {"table": (9, 2), "w": (5,)}
NUM_TERMS = 8  # micro-batches of a call, of all replicas


def terms_of(call, dtype, *, dense, order):
    """Gradients of magnitudes that a sum of rounded numbers does not hold; rows may repeat."""
    luck, terms = np.random.default_rng(call), []
    for _ in range(NUM_TERMS):
        made = {name: luck.standard_normal((4, *shape[1:]) if name == "table" else shape)
                * np.exp2(luck.integers(-9, 10)) for name, shape in SHAPES.items()}  # fmt: skip
        indices = luck.permutation(9)[:4]
        rows = gr.IndexedSlices(made.pop("table").astype(dtype), indices, SHAPES["table"])
        terms.append({"table": rows.to_dense() if dense else rows, "w": made["w"].astype(dtype)})
    return [terms[at] for at in order.permutation(NUM_TERMS)]


def train(
    counts,
    *,
    dense=False,
    calls=range(4),
    state=None,
    seed=None,
    weights=None,
    dtype="float32",
    **options,
):
    """The values of a training, in which the replicas get the terms in another order each."""
    num_replicas = sum(counts)

    def step_of(mesh, replicas):
        made = [gr.Variable(np.ones(shape), name, dtype=dtype, device=mesh)
                for name, shape in SHAPES.items()]  # fmt: skip
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        optimizer = gr.GradientDescentOptimizer(0.25)
        return gr.SyncStep(
            made, optimizer, ops, sparse_variables=[] if dense else made[:1], **options
        )

    def call(step, number, replicas):
        order = np.random.default_rng([number, num_replicas, dense])
        terms = terms_of(number, dtype, dense=dense, order=order)
        size = NUM_TERMS // num_replicas
        own = [
            {name: [term[name] for term in terms[at * size : (at + 1) * size]] for name in SHAPES}
            for at in replicas
        ]
        done = step(own, weights=weights and [[weights] * size] * len(replicas))
        return done, step.global_step

    return training.train(counts, step_of, call, calls, state, seed=seed)


OPTIONS = {
    "plain": {},
    "weighted": {"weights": 0.5},
    "scaled": {"loss_scale": 4.0},
    "checked": {"check_finite": True},
    "weighted and checked": {"weights": 3, "check_finite": True},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
}


@pytest.mark.parametrize(
    ("counts", "shard", "seed"),
    [((4,), False, None), ((4,), True, 3), ((1, 3), False, None), ((2, 2), True, None)],
    ids=str,
)
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_have_the_bits_that_arrays_have(name, counts, shard, seed):
    """In any layout of four replicas, in any order of the terms."""
    options = OPTIONS[name]
    with warnings.catch_warnings(action="error"):
        wanted = train([4], dense=True, **options)
        found = train(counts, shard_optimizer=shard, seed=seed, **options)
    assert found[:2] == wanted[:2]


LAYOUTS = [(1,), (2,), (4,), (1, 1), (1, 3), (2, 2), (1, 2, 1)]


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[*HealthCheck])
@given(
    seed=st.integers(0, 9999),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
    counts=st.sampled_from(LAYOUTS),
    num_calls=st.sampled_from([1, 2]),
)
def test_rows_are_terms_however_they_are_split(seed, dtype, counts, num_calls):
    """Over gradients, replicas, processes and calls, in any order; or a warning."""
    luck = np.random.default_rng(seed)
    values = adversarial_terms(20, 18, dtype, seed)
    indices = luck.integers(0, 5, 20)
    of_term = np.sort(luck.integers(0, NUM_TERMS, 20))  # micro-batches, some without rows
    order, terms = luck.permutation(20), []
    for number in range(NUM_TERMS):
        own = order[of_term == number]
        terms.append(gr.IndexedSlices(np.array(values)[own], indices[own], (5, 18)))
    size = NUM_TERMS // num_calls // sum(counts)

    def work(mesh, replicas):
        table = gr.Variable(np.zeros((5, 18)), "table", dtype=dtype, device=mesh)
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True, words=8)
        step = gr.SyncStep(
            [table], gr.GradientDescentOptimizer(1.0), ops, sparse_variables=[table],
            num_required=num_calls * sum(counts),
        )  # fmt: skip
        for call in range(num_calls):
            starts = [(call * sum(counts) + replica) * size for replica in replicas]
            own = [[terms[at : at + size]] for at in starts]
            step(own, weights=[[1] * size] * len(replicas))
        return table.numpy()

    with warnings.catch_warnings(record=True, action="always") as caught:
        found = training.run_replicas(counts, work)
    for index in range(5):
        rows = list(np.array(values)[indices == index])
        with np.errstate(all="ignore"):
            wanted = -exact_means(rows, NUM_TERMS) if rows else np.zeros(18)
        held = np.ones(18, bool) if not caught else fit_into(8, list(map(np.abs, rows or [wanted])))
        for each in found:
            difference = each[index] == wanted.astype(each.dtype)
            assert (difference | np.isnan(wanted) | ~held).all()


@pytest.mark.parametrize(("before", "after"), [((4,), (4,)), ((4,), (1, 3)), ((2, 2), (4,))])
def test_a_state_with_rows_that_wait_continues(before, after):
    wanted = train([4], num_required=8)
    state = train(before, calls=range(3), num_required=8)[2]
    total = state["accumulators"]["table"]["partial_sums"][0]
    assert total["values"].shape == (total["indices"].size, 3, 2)
    assert train(after, calls=[3], state=state, num_required=8)[0] == wanted[0]


def make_step(mesh, check_finite=False, **options):
    table = gr.Variable(np.zeros((5, 1), np.float32), "table", device=mesh)
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, **{"exact": True, **options})
    return gr.SyncStep(
        [table], gr.GradientDescentOptimizer(1.0), ops, sparse_variables=[table],
        check_finite=check_finite,
    )  # fmt: skip


def rows(*values):
    return gr.IndexedSlices(np.float32(values)[:, None], [3] * len(values))


def test_a_term_that_is_not_finite_adds_nothing():
    """Also where another replica is not read."""
    with gr.open_mesh(3, backend="sim", strict=True) as mesh:
        step = make_step(mesh, check_finite=True)
        terms = [[[rows(1.0, 1e8), rows(-1e8)]], None, [[rows(np.inf)]]]
        for weights in ([[1, 1], 0, [1]], [[1, 2], 0, [0.5]]):
            with pytest.raises(FloatingPointError, match="'table' in replica 2 is not finite"):
                step(terms, weights=weights)
        assert (step.global_step, step.accumulators[0].num_accumulated()) == (0, 0)
        assert step([*terms[:2], [[rows(0.5)]]], weights=[[1, 1], 0, [1]])
        assert step.variables[0].numpy()[3] == [-0.5]


def test_processes_that_differ_in_it_are_named():
    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            step = make_step(mesh, exact=group.rank == 0)
            with pytest.raises((InvalidArgumentError, CollectiveError)) as caught:
                step([[[rows(1.0)]]])
            return str(caught.value)

    assert "words is 3 in process 0, 1 in process 1" in run_processes(2, work)[0]


def test_nothing_is_compiled_inside_of_a_step():
    """Rows repeat, and are on some of the devices."""
    with gr.open_mesh([0, 0, 1], backend="sim") as mesh, watched_compiles(mesh) as watch:
        watch.finds_calls = True
        step = make_step(mesh)
        step([[[rows(1.0, 2.0), rows(*[0.5] * 99)]], [[rows(1.0)]], [[rows()]]])
    assert watch.late == []
