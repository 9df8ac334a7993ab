"""SyncStep(sparse_variables=): IndexedSlices give what the same gradients give as arrays."""

import threading

import numpy as np
import pytest
from support.compiled_first import watched_compiles
from support.thread_group import run_processes
from train import training
from train.test_sync_step import nothing_changes

import gradreduce as gr
from gradreduce.accumulator import sparse_storage
from gradreduce.errors import CollectiveError

VARIABLES = {"table": ((13, 3), "float32"), "w": ((3, 2), "float32"), "bias": ((7,), "float32")}
SPARSE = ("table", "bias")
STALE = 2  # the call whose gradients are


def slices_of(random, shape, dtype="float32"):
    """Up to four rows of small integers, of which some may have the same index."""
    num_rows = int(random.integers(0, 5))
    rows = random.integers(-4, 5, (num_rows, *shape[1:])).astype(dtype)
    return gr.IndexedSlices(rows, random.integers(0, shape[0], num_rows), shape)


def terms_of(number, num_replicas, *, dense):
    """Gradients of one call: up to three micro-batches; in every third, the table has none."""
    random = np.random.default_rng(number)
    terms = []
    for replica in range(num_replicas):
        of_replica = {}
        for name, (shape, dtype) in VARIABLES.items():
            if name in SPARSE:
                slices = [slices_of(random, shape) for _ in range(1 + (number + replica) % 3)]
                of_replica[name] = [each.to_dense() for each in slices] if dense else slices
            else:
                of_replica[name] = [random.integers(-4, 5, shape).astype(dtype)]
        if number % 3 == 1:
            of_replica["table"] = None
        terms.append(of_replica)
    return terms


def train(counts, optimizer, *, dense=False, calls=range(6), state=None, seed=None, **options):
    def step_of(mesh, replicas):
        made = [
            gr.Variable(np.full(shape, 1.0 + replicas[0]), name, dtype=dtype, device=mesh)
            for name, (shape, dtype) in VARIABLES.items()
        ]
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        sparse = [] if dense else [each for each in made if each.name in SPARSE]
        return gr.SyncStep(made, optimizer(), ops, sparse_variables=sparse, **options)

    def call(step, number, replicas):
        terms = terms_of(number, sum(counts), dense=dense)[replicas[0] : replicas[-1] + 1]
        done = step(terms, step.global_step - (number == STALE))
        return done, step.global_step, step.last_norm

    return training.train(counts, step_of, call, calls, state, seed=seed)


def sgd():
    return gr.GradientDescentOptimizer(0.25)


OPTIONS = {
    "plain": {},
    "two calls": {"num_required": 8},
    "clipped": {"clip_norm": 2.0},
    "scaled": {"loss_scale": 4.0, "clip_norm": float("inf")},
    "skipping": {"skip_nonfinite": True},
    "checked": {"check_finite": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_update_as_the_same_arrays_do(name):
    """All sums are exact; only norms and what is scaled by them are rounded in another order."""
    options = OPTIONS[name]
    wanted, seen, _ = train([4], sgd, dense=True, **options)
    found, seen_here, _ = train([4], sgd, **options)
    assert [each[:2] for each in seen_here] == [each[:2] for each in seen]
    for one, other in zip(found, wanted, strict=True):
        values = [np.frombuffer(each, np.float32) for each in (one, other)]
        tolerance = 1e-6 if name == "clipped" else 0
        np.testing.assert_allclose(*values, rtol=tolerance, atol=tolerance)
    norms = [[each[2] or 0.0 for each in calls] for calls in (seen_here, seen)]
    np.testing.assert_allclose(*norms, rtol=1e-12)


@pytest.mark.parametrize(
    ("counts", "shard", "seed"),
    [((4,), True, None), ((4,), False, 3), ((1, 3), False, None), ((2, 2), True, None),
     ((1, 1, 2), True, None)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", OPTIONS)
def test_every_layout_has_the_same_bits(name, counts, shard, seed):
    """Adagrad with the rows only: what no gradient touches stays as it is."""
    options = OPTIONS[name]
    make = lambda: gr.AdagradOptimizer(0.5)  # noqa: E731
    wanted = train([4], make, **options)
    found = train(counts, make, shard_optimizer=shard, seed=seed, **options)
    np.testing.assert_equal(found, wanted)


@pytest.mark.parametrize(("before", "after"), [((4,), (1, 3)), ((2, 2), (4,)), ((3, 1), (2, 2))])
def test_a_state_with_rows_that_wait_continues(before, after):
    make = lambda: gr.MomentumOptimizer(0.5, 0.75)  # noqa: E731
    wanted = train([4], make, num_required=8)
    state = train(before, make, calls=range(4), num_required=8)[2]
    assert state["accumulators"]["table"]["num_accumulated"] == 4
    found = train(after, make, calls=range(4, 6), state=state, num_required=8)
    assert found[0] == wanted[0]
    np.testing.assert_equal(found[2], wanted[2])


def make_step(mesh, **options):
    table = gr.Variable(np.ones((5, 2), np.float32), "table", device=mesh)
    w = gr.Variable(np.ones(2, np.float32), "w", device=mesh)
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    return gr.SyncStep([table, w], sgd(), ops, sparse_variables=[table], **options)


def rows(indices, values=None, shape=None):
    values = np.ones((len(indices), 2), np.float32) if values is None else values
    return gr.IndexedSlices(values, indices, shape)


WRONG = {
    "dense": (np.ones((5, 2), np.float32), TypeError, "must be IndexedSlices, not ndarray"),
    "index": (rows([5]), ValueError, r"terms of replica 1 for 'table'.*= 5 is not below"),
    "width": (rows([0], np.ones((1, 3), np.float32)), ValueError, r"has rows float32\[1, 3\]"),
    "dtype": (rows([0], np.ones((1, 2))), ValueError, r"has rows float64\[1, 2\]"),
    "shape": (rows([0], shape=(6, 2)), ValueError, r"has dense_shape \(6, 2\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_are_refused_and_nothing_changes(name):
    term, error, message = WRONG[name]
    mesh = gr.open_mesh(2, backend="sim", strict=True)
    step, grad = make_step(mesh), [np.ones(2, np.float32)]
    with nothing_changes(step, error, message):
        step([[[rows([1])], grad], [[term], grad]])
    assert step([[[rows([1])], grad], [[rows([1, 1])], grad]])
    assert step.variables[0].numpy()[:, 0].tolist() == [1, 1 - 0.25 * 1.5, 1, 1, 1]


def test_the_argument_names_variables_of_the_step():
    mesh = gr.open_mesh(2, backend="sim")
    w = gr.Variable(np.ones(3, np.float32), "w", device=mesh)
    s = gr.Variable(np.float32(1), "s", device=mesh)
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    for sparse, error, message in (
        ([s], ValueError, r"sparse_variables= has <Variable 's'.*, a scalar, which has no rows"),
        (["w"], ValueError, "sparse_variables= has 'w', which is not in variables"),
        (w, TypeError, "sparse_variables=<Variable 'w'.* must be a list of Variables"),
        (None, TypeError, r"sparse_variables=None must be a list of Variables; pass \(\) for none"),
    ):
        with pytest.raises(error, match=message):
            gr.SyncStep([w, s], sgd(), ops, sparse_variables=sparse)
    step = gr.SyncStep([w, s], sgd(), ops, sparse_variables=iter([w]))
    assert type(step.accumulators[0]) is not type(step.accumulators[1])
    wrong = gr.SyncStep([w, s], sgd(), ops)
    with nothing_changes(wrong, TypeError, "or name the variable in sparse_variables="):
        wrong([[[gr.IndexedSlices(np.ones(1, np.float32), [0])], None]] * 2)


def test_a_gradient_that_is_not_finite_is_named():
    mesh = gr.open_mesh(2, backend="sim")
    step, grad = make_step(mesh, check_finite=True), [np.ones(2, np.float32)]
    bad = rows([3, 4], np.float32([[1, 1], [1, np.inf]]))
    with pytest.raises(FloatingPointError, match="gradient of 'table' in replica 1 is not finite"):
        step([[[rows([])], grad], [[bad], grad]])
    assert [each.num_accumulated() for each in step.accumulators] == [0, 0]


def test_processes_agree_on_sparse_variables():
    def work(group):
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        w = gr.Variable(np.ones((3, 1), np.float32), "w", device=mesh)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        step = gr.SyncStep([w], sgd(), ops, sparse_variables=[w] * group.rank)
        grad = rows([0], np.ones((1, 1), np.float32)) if group.rank else np.ones((3, 1), "float32")
        with pytest.raises(ValueError, match="different calls: sparse_variables is"):
            step([[[grad]]])

    run_processes(2, work)


def test_no_rows_at_all_update_nothing():
    mesh = gr.open_mesh(2, backend="sim", strict=True)
    step = make_step(mesh, clip_norm=1.0)
    empty = np.zeros((0, 2), np.float32)
    assert step([[[rows([], empty)], None], [[rows([], empty)], None]])
    assert step.last_norm == 0.0
    assert step.variables[0].numpy().tolist() == [[1, 1]] * 5


def test_rows_of_16_bits_compile_nothing_inside_of_a_step():
    """Rows of micro-batches are joined in the dtype of the table, after arrays were added."""
    mesh = gr.open_mesh(2, backend="sim")
    with watched_compiles(mesh) as watch:
        watch.finds_calls = True
        table = gr.Variable(np.ones((5, 2)), "t", dtype="bfloat16", device=mesh)
        w = gr.Variable(np.ones(3, np.float32), "w", device=mesh)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        step = gr.SyncStep([w, table], sgd(), ops, sparse_variables=[table])
        term = gr.IndexedSlices(np.ones((1, 2), table.dtype), [0])
        step([[[np.ones(3, np.float32)] * 2, [term, term]]] * 2)
    assert watch.late == []


def test_an_error_after_the_exchange_of_rows_stops_all_processes(monkeypatch):
    """Otherwise one would be an update ahead of the others."""
    merge = sparse_storage.coalesce_n
    planted = threading.local()

    def coalesce(*args, **kwargs):
        if getattr(planted, "error", False):
            raise MemoryError("planted")
        return merge(*args, **kwargs)

    monkeypatch.setattr(sparse_storage, "coalesce_n", coalesce)

    def work(group):
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        step, grad = make_step(mesh), [np.ones(2, np.float32)]
        assert step([[[rows([1])], grad]])
        planted.error, done = group.rank == 1, []
        with pytest.raises(MemoryError if group.rank else CollectiveError, match="planted"):
            for _ in range(3):
                done.append(step([[[rows([1])], grad]]))
        return done

    assert run_processes(2, work) in ([[], []], [[True], []])  # process 0 may have all rows
