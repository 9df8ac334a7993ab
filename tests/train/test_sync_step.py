"""One training step: its values, its order, and its budget of launches, copies and bytes."""

import itertools
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from support.exact_data import same_copies
from support.meshes import unchanged

import gradreduce as gr
from gradreduce.device import as_dtype
from gradreduce.reduce.algorithms import ALGORITHMS

SHAPES = [(64, 32), (32,), (32, 10), ()]
NUM_MICRO = 3
NUM_REPLICAS = 4


def make_terms(dtype="float32", seed=0, exact=True):
    """terms[replica][variable]: a list of NUM_MICRO gradients; small integers if exact."""
    rng = np.random.default_rng(seed)

    def one(shape):
        values = rng.integers(-8, 9, shape) if exact else rng.standard_normal(shape)
        return np.asarray(values).astype(as_dtype(dtype))

    return [
        [[one(shape) for _ in range(NUM_MICRO)] for shape in SHAPES] for _ in range(NUM_REPLICAS)
    ]


def make_step(mesh, algorithm="hierarchical_copy", num_packs=1, dtype="float32", **options):
    rng = np.random.default_rng(7)
    variables = [
        gr.Variable(rng.integers(-4, 5, shape).astype(as_dtype(dtype)), f"v{place}", device=mesh)
        for place, shape in enumerate(SHAPES)
    ]
    optimizer = gr.MomentumOptimizer(0.5, 0.75)
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)
    return variables, gr.SyncStep(variables, optimizer, ops, **options)


def open_sim(placement, **options):
    return gr.open_mesh(placement, backend="sim", strict=True, **options)


class PlainModel:
    """The same step in plain NumPy, in float32: exact on the integer data of these tests."""

    def __init__(self, variables):
        self.values = [variable.numpy().astype(np.float64) for variable in variables]
        self.moments = [np.zeros_like(value) for value in self.values]

    def step(self, arrivals):
        """arrivals[k][variable] are the summed gradients of one arrival."""
        for place, value in enumerate(self.values):
            grads = [arrival[place] for arrival in arrivals if arrival[place] is not None]
            if grads:
                mean = sum(grads) / len(grads)
                self.moments[place] = 0.75 * self.moments[place] + mean
                self.values[place] = value - 0.5 * self.moments[place]


@contextmanager
def nothing_changes(step, error=None, match=""):
    """Inside nothing is recorded, added or updated; and this error is raised, if one is given."""
    before = [variable.numpy() for variable in step.variables]
    at, added = step.global_step, [each.num_accumulated() for each in step.accumulators]
    mesh = step.variables[0].devices[0].mesh
    raised = nullcontext() if error is None else pytest.raises(error, match=match)
    with mesh.journal() as journal, raised:
        yield
    assert journal.records == []
    assert step.global_step == at
    assert [each.num_accumulated() for each in step.accumulators] == added
    for variable, value in zip(step.variables, before, strict=True):
        assert np.array_equal(variable.numpy(), value)


def check_model(variables, model):
    for variable, value in zip(variables, model.values, strict=True):
        for replica in range(NUM_REPLICAS):
            with gr.replica(replica):
                assert np.array_equal(variable.numpy(), value)


def gradients_of(terms):
    return [
        [None if of_var is None else sum(t.astype(np.float64) for t in of_var) for of_var in rep]
        for rep in terms
    ]


PLACEMENTS = ([0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 2], [0, 0, 0, 0])
IMPLEMENTATIONS = ("numpy", pytest.param("compiled", marks=pytest.mark.host))


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("peer_access", [True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_values_equal_a_plain_model(placement, algorithm, peer_access, kernels):
    with open_sim(placement, peer_access=peer_access, kernels=kernels) as mesh:
        variables, step = make_step(mesh, algorithm)
        model = PlainModel(variables)
        for seed in range(3):
            terms = make_terms(seed=seed)
            with unchanged(*(term for row in terms for of_var in row for term in of_var)):
                assert step(terms)
            model.step(gradients_of(terms))
        assert step.global_step == 3
        check_model(variables, model)


# The budget of one step. Raising a number here is a decision, not an accident: say why in the
# commit. Rows of a launch: how many tensors it serves. Four variables on four replicas.
#   aggregate   one launch on each physical device, all variables and its replicas in it
#   accumulate  the same
#   all-reduce  8 KiB of gradients is a small pack: one device adds it (peers), or one rank each
#   optimize    one launch on each physical device
FLAT_BYTES = 4 * (64 * 32 + 32 + 32 * 10 + 4)  # a scalar takes a 16-byte unit
BUDGETS = {
    # (placement, algorithm): (launches by kernel, collectives, bytes that left a device)
    ((0, 0, 0, 0), "hierarchical_copy"): ({"add_n": 2, "all_sum": 1, "momentum": 1}, 0, 0),
    ((0, 0, 0, 0), "nccl"): ({"add_n": 2, "all_sum": 1, "momentum": 1}, 0, 0),
    ((0, 0, 1, 1), "hierarchical_copy"): (
        {"add_n": 4, "all_sum": 1, "momentum": 2}, 0, 4 * FLAT_BYTES,
    ),
    ((0, 0, 1, 1), "nccl"): ({"add_n": 4, "all_sum": 4, "momentum": 2}, 2, 2 * FLAT_BYTES),
    ((0, 1, 2, 3), "hierarchical_copy"): (
        {"add_n": 8, "all_sum": 1, "momentum": 4}, 0, 6 * FLAT_BYTES,
    ),
    ((0, 1, 2, 3), "nccl"): ({"add_n": 8, "all_sum": 4, "momentum": 4}, 4, 4 * FLAT_BYTES),
}  # fmt: skip


@pytest.mark.parametrize(("placement", "algorithm"), BUDGETS, ids=str)
def test_one_step_keeps_its_budget(placement, algorithm):
    with open_sim(placement) as mesh:
        _, step = make_step(mesh, algorithm)
        terms = make_terms()
        step(terms)  # the first step makes the slots
        with mesh.journal() as journal:
            assert step(terms)
        by_kernel = {
            name: len(list(group))
            for name, group in itertools.groupby(
                sorted(record.name for record in journal.of("launch"))
            )
        }
        launches, collectives, crossing = BUDGETS[placement, algorithm]
        assert by_kernel == launches
        assert journal.launches == sum(launches.values())
        assert len(journal.of("collective")) == collectives
        assert journal.bytes == crossing
        # No copy, no upload, no fill, and the host waits for nothing.
        assert (journal.copies, journal.uploads, journal.syncs) == (0, 0, 0)
        assert journal.of("fill") == []


def test_stages_come_in_the_order_of_the_diagram():
    with open_sim([0, 0, 1, 1]) as mesh:
        _, step = make_step(mesh)
        step(make_terms())
        with mesh.journal() as journal:
            step(make_terms())
        assert [(record.name, record.device, record.num_rows) for record in journal.records] == [
            ("add_n", 0, 8), ("add_n", 2, 8),  # terms of 4 variables on 2 replicas -> gradients
            ("add_n", 0, 8), ("add_n", 2, 8),  # first arrival after a take: copied into the sum
            ("all_sum", 0, 1),                 # the sums lie packed already: one pack
            ("momentum", 0, 8), ("momentum", 2, 8),
        ]  # fmt: skip


def test_without_peer_access_no_launch_leaves_its_device():
    with open_sim([0, 0, 1, 1], peer_access=False) as mesh:
        _, step = make_step(mesh)
        with mesh.journal() as journal:
            assert step(make_terms())
        assert all(record.nbytes == 0 for record in journal.of("launch"))
        assert journal.bytes == sum(record.nbytes for record in journal.of("copy")) > 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("method", gr.AggregationMethod)
def test_same_bits_for_every_placement_and_packing(method, dtype):
    finals = set()
    for placement, num_packs, peers in itertools.product(PLACEMENTS, (0, 3), (True, False)):
        with open_sim(placement, peer_access=peers) as mesh:
            variables, step = make_step(mesh, "hierarchical_copy", num_packs, dtype,
                                        aggregation_method=method)  # fmt: skip
            for seed in range(2):
                assert step(make_terms(dtype, seed, exact=False))
            finals.add(tuple(variable.numpy().tobytes() for variable in variables))
    assert len(finals) == 1


def test_more_arrivals_than_replicas_are_waited_for():
    with open_sim([0, 1, 0, 1]) as mesh:
        variables, step = make_step(mesh, num_required=10)
        model = PlainModel(variables)
        terms = [make_terms(seed=seed) for seed in range(3)]
        assert [step(each) for each in terms] == [False, False, True]
        model.step([arrival for each in terms for arrival in gradients_of(each)])
        assert step.global_step == 1
        for variable, value in zip(variables, model.values, strict=True):
            assert np.allclose(variable.numpy(), value, rtol=1e-6, atol=0)  # thirds are not exact


def test_stale_gradients_are_dropped_and_launch_no_update():
    with open_sim(4) as mesh:
        _, step = make_step(mesh)
        assert step(make_terms())
        with nothing_changes(step):
            assert step(make_terms(seed=1), local_step=0) is False
        assert [accumulator.num_dropped for accumulator in step.accumulators] == [4] * 4


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_at_the_last_step_a_call_raises_before_gradients_are_added(shard_optimizer):
    with open_sim(NUM_REPLICAS) as mesh:
        _, step = make_step(mesh, shard_optimizer=shard_optimizer)
        for accumulator in step.accumulators:
            accumulator.set_global_step(2**63 - 1)
        with nothing_changes(step, ValueError, r"^the accumulator 'grad_accum' is at step 9223"):
            step(make_terms())


@pytest.mark.parametrize("kind", [list, tuple])
def test_none_among_terms_is_ignored(kind):
    """As ``compute_gradients`` gives it; a variable without gradients only counts the step."""
    with open_sim(4) as mesh:
        variables, step = make_step(mesh)
        model = PlainModel(variables)
        terms = make_terms()
        wanted = gradients_of([[None, *of_replica[1:3], None] for of_replica in terms])
        for of_replica in terms:
            of_replica[0] = kind([None])
            of_replica[1] = kind([None, *of_replica[1], None])
            of_replica[3] = None
        assert step(terms)
        model.step(wanted)
        check_model(variables, model)
        assert [accumulator.global_step for accumulator in step.accumulators] == [1] * 4
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            step([[[None]] * len(SHAPES)] * 4)
        assert step(make_terms())  # and they take part again


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_plain_steps_do_not_grow_the_pool(shard_optimizer):
    with open_sim([0, 0, 1, 1]) as mesh:
        _, step = make_step(mesh, shard_optimizer=shard_optimizer)
        terms = make_terms()
        for _ in range(3):
            step(terms)
        grown = [device._pool.grown for device in mesh.devices]
        for _ in range(50):
            step(terms)
        assert [device._pool.grown for device in mesh.devices] == grown


SPARSE = gr.IndexedSlices(np.ones((1, 10), np.float32), [3], (32, 10))
# (replica, variable, its terms, error, text)
BAD = [
    (1, 0, [np.zeros((2, 2), "f4")], ValueError,
     r"terms of replica 1 for 'v0': got float32\[2, 2\], expected float32\[64, 32\]"),
    (3, 1, [np.zeros(32)], ValueError, "terms of replica 3 for 'v1': got float64"),
    (0, 0, [], ValueError, "a list of at least one gradient"),
    (0, 1, np.zeros(32, "f4"), ValueError, "a list of at least one gradient"),
    (0, 0, None, ValueError, "or None on every replica"),
    (1, 1, [None], ValueError, r"replica 1 for 'v1': .*or None on every replica"),
    (3, 2, [SPARSE], TypeError, r"replica 3 for 'v2': IndexedSlices.*\.to_dense\(\)"),
]  # fmt: skip


def test_bad_terms_raise_and_change_nothing():
    with open_sim(4) as mesh:
        _, step = make_step(mesh)
        for replica, variable, wrong, error, text in BAD:
            terms = make_terms()
            terms[replica][variable] = wrong
            with nothing_changes(step, error, text):
                step(terms)
        terms = make_terms()
        terms[1][0] = [mesh.devices[2].zeros((64, 32), "float32")]
        with nothing_changes(step, ValueError, r"replica 1 for 'v0': Buffer.* is not on sim:1"):
            step(terms)
        with nothing_changes(step, ValueError, "terms has 3 entries; expected 4, one per device"):
            step(make_terms()[:3])
        terms[2].pop()
        with nothing_changes(step, ValueError, r"terms\[2\] has 3 entries; expected 4"):
            step(terms)


def test_terms_of_a_replica_may_be_of_several_kinds():
    with open_sim(4) as mesh:
        variables, step = make_step(mesh)
        model, terms = PlainModel(variables), make_terms()
        arrivals = [[sum(each) for each in of_replica] for of_replica in terms]
        for device, of_replica in zip(mesh.devices, terms, strict=True):
            of_replica[0][0] = device.upload(of_replica[0][0])
        assert step(terms)
        model.step(arrivals)
        assert [each.numpy().tolist() for each in variables] == [v.tolist() for v in model.values]


def test_steps_and_numbers_may_be_variables():
    with open_sim(2) as mesh:
        number = gr.Variable(4, trainable=False, device=mesh.devices[1])
        variable = gr.Variable(np.zeros(2, np.float32), "v", device=mesh)
        ops, optimizer = gr.HierarchicalCopyAllReduce(mesh=mesh), gr.GradientDescentOptimizer(1.0)
        step = gr.SyncStep([variable], optimizer, ops, num_required=number)
        count = gr.Variable(0, "global_step", trainable=False, device=mesh)
        terms = [[[np.ones(2, np.float32)]]] * 2
        assert [step(terms, count), step(terms, count)] == [False, True]
        assert step.global_step == 1
        assert not step(terms, count)  # stale
        assert step.accumulators[0].num_dropped == 2
        count.assign_add(1)
        assert [step(terms, count), step(terms, count)] == [False, True]
        assert variable.numpy().tolist() == [-2.0, -2.0]
        with pytest.raises(TypeError, match=r"local_step=1\.5 must be an integer or a Variable"):
            step(terms, 1.5)


def test_any_ops_may_reduce():
    """Here ops that add on one device by a function of NumPy's; it sees sums in float32."""
    seen = []

    def added(terms):
        seen.append({str(term.dtype) for term in terms})
        return sum(terms)

    with open_sim([0, 0, 1]) as mesh:
        ops = gr.ReductionToOneDevice(mesh.devices[2], added)
        half = gr.Variable(np.zeros(2, "float16"), "half", device=mesh)
        step = gr.SyncStep([half], gr.GradientDescentOptimizer(1.0), ops)
        for turn in range(2):
            assert step([[[np.full(2, 3.0 * replica, "float16")]] for replica in range(3)])
            assert same_copies(half, np.full(2, -3.0 * (turn + 1), "float16"))
    assert seen == [{"float32"}] * 2


def test_bad_construction():
    with open_sim(2) as mesh, open_sim(2) as other:
        ops, optimizer = gr.AllReduceCrossDeviceOps(mesh=mesh), gr.MomentumOptimizer(0.1, 0.9)
        here, there = (gr.Variable([1.0], device=each) for each in (mesh, other))
        counter = gr.Variable(0, trainable=False, device=mesh)
        for arguments, options, error, text in [
            (([], optimizer, ops), {}, ValueError, "No variables provided"),
            (([here, there], optimizer, ops), {}, ValueError, "are on different devices"),
            (([here, here], optimizer, ops), {}, ValueError, "variables contains <Var.* more than"),
            (([counter], optimizer, ops), {}, ValueError, "not trainable"),
            (([np.zeros(1)], optimizer, ops), {}, TypeError, r"variables\[0\] is ndarray.*, not a"),
            (([here], ops, optimizer), {}, TypeError, r"optimizer=.* is not an Optimizer"),
            (([here], optimizer, 3), {}, TypeError, "^cross_device_ops=3 is not a CrossDeviceOps"),
            (([here], optimizer, ops), {"num_required": 0}, ValueError,
             "num_required must be positive, but was 0"),
            (([here], optimizer, ops), {"num_required": 2.5}, TypeError,
             r"num_required=2\.5 must be an integer"),
            (([here], optimizer, ops), {"aggregation_method": 3}, ValueError,
             "Invalid aggregation_method"),
        ]:  # fmt: skip
            with pytest.raises(error, match=text):
                gr.SyncStep(*arguments, **options)
