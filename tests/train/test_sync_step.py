"""One training step: its values, its order, and its budget of launches, copies and bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.device import accumulate_dtype, as_dtype
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
            assert step(terms)
            model.step(gradients_of(terms))
        assert step.global_step == 3
        for variable, value in zip(variables, model.values, strict=True):
            for replica in range(NUM_REPLICAS):
                with gr.replica(replica):
                    assert np.array_equal(variable.numpy(), value)


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
    for placement, num_packs, peers in itertools.product(PLACEMENTS, (0, 1, 3, 7), (True, False)):
        with open_sim(placement, peer_access=peers) as mesh:
            variables, step = make_step(mesh, "hierarchical_copy", num_packs, dtype,
                                        aggregation_method=method)  # fmt: skip
            for seed in range(2):
                assert step(make_terms(dtype, seed, exact=False))
            finals.add(tuple(variable.numpy().tobytes() for variable in variables))
    assert len(finals) == 1


def test_nccl_gives_the_same_bits_for_every_packing_of_one_placement():
    finals = set()
    for num_packs in (0, 1, 2, 5, 1000):
        with open_sim([0, 0, 1, 2]) as mesh:
            variables, step = make_step(mesh, "nccl", num_packs)
            assert step(make_terms(exact=False))
            finals.add(tuple(variable.numpy().tobytes() for variable in variables))
    assert len(finals) == 1


def test_half_precision_is_rounded_once_in_the_mean():
    """2048 + 1 + 1 + 1 in float16 stalls at 2048; summed in float32 the mean is 512.75."""
    with open_sim([0, 1, 2, 3]) as mesh:
        variable = gr.Variable(np.zeros(3, np.float16), device=mesh)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        step = gr.SyncStep([variable], gr.GradientDescentOptimizer(1.0), ops)
        values = [2048, 1, 1, 1]
        assert step([[[np.full(3, value, np.float16)]] for value in values])
        assert np.array_equal(variable.numpy(), -np.full(3, np.float16(512.75)))
        assert accumulate_dtype(variable.dtype) == np.float32


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
        variables, step = make_step(mesh)
        assert step(make_terms())
        before = [variable.numpy() for variable in variables]
        with mesh.journal() as journal:
            assert step(make_terms(seed=1), local_step=0) is False
        assert journal.records == []
        assert step.global_step == 1
        assert [accumulator.num_dropped for accumulator in step.accumulators] == [4] * 4
        for variable, value in zip(variables, before, strict=True):
            assert np.array_equal(variable.numpy(), value)


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_at_the_last_step_a_call_raises_before_gradients_are_added(shard_optimizer):
    with open_sim(NUM_REPLICAS) as mesh:
        variables, step = make_step(mesh, shard_optimizer=shard_optimizer)
        before = [variable.numpy() for variable in variables]
        for accumulator in step.accumulators:
            accumulator.set_global_step(2**63 - 1)
        with mesh.journal() as journal:
            with pytest.raises(ValueError, match=r"^the accumulator 'grad_accum' is at step 9223"):
                step(make_terms())
            assert not journal.records
        assert [each.num_accumulated() for each in step.accumulators] == [0] * len(SHAPES)
        assert step.global_step == 2**63 - 1
        for variable, value in zip(variables, before, strict=True):
            assert (variable.numpy() == value).all()


def test_a_variable_without_gradients_is_unchanged_and_its_step_increases():
    with open_sim(4) as mesh:
        variables, step = make_step(mesh)
        model = PlainModel(variables)
        terms = make_terms()
        for of_replica in terms:
            of_replica[1] = None
        assert step(terms)
        model.step(gradients_of(terms))
        for variable, value in zip(variables, model.values, strict=True):
            assert np.array_equal(variable.numpy(), value)
        assert [accumulator.global_step for accumulator in step.accumulators] == [1] * 4
        assert step(make_terms())  # and it takes part again


@pytest.mark.parametrize("kind", [list, tuple])
def test_none_among_terms_is_ignored(kind):
    """As ``compute_gradients`` gives it for a variable that the loss does not reach."""
    with open_sim(4) as mesh:
        variables, step = make_step(mesh)
        model = PlainModel(variables)
        terms = make_terms()
        wanted = gradients_of([[None, *of_replica[1:]] for of_replica in terms])
        for of_replica in terms:
            of_replica[0] = kind([None])
            of_replica[1] = kind([None, *of_replica[1], None])
        assert step(terms)
        model.step(wanted)
        for variable, value in zip(variables, model.values, strict=True):
            assert np.array_equal(variable.numpy(), value)
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            step([[[None]] * len(SHAPES)] * 4)
        terms[1][1] = [None]  # not on every replica
        with pytest.raises(ValueError, match=r"replica 1 for 'v1': .*or None on every replica"):
            step(terms)


def test_rows_are_refused_by_the_name_of_their_variable():
    with open_sim(4) as mesh:
        variables, step = make_step(mesh)
        before, terms = [variable.numpy() for variable in variables], make_terms()
        rows = gr.IndexedSlices(np.ones((1, 10), np.float32), [3], (32, 10))
        terms[3][2][1] = rows
        with pytest.raises(TypeError, match=r"replica 3 for 'v2': IndexedSlices.*\.to_dense\(\)"):
            step(terms)
        assert [accumulator.num_accumulated() for accumulator in step.accumulators] == [0] * 4
        assert all(map(np.array_equal, before, [variable.numpy() for variable in variables]))
        terms[3][2][1] = rows.to_dense()
        assert step(terms)


def test_inputs_are_never_written_and_variables_do_not_alias():
    with open_sim([0, 0, 1, 1]) as mesh:
        variables, step = make_step(mesh)
        terms = make_terms()
        flat = [term for of_replica in terms for of_var in of_replica for term in of_var]
        before = [term.copy() for term in flat]
        seen = []
        for _ in range(3):
            assert step(terms)
            seen.append([variable.numpy() for variable in variables])
            snapshot = [[array.copy() for array in arrays] for arrays in seen]
        assert all(np.array_equal(term, copy) for term, copy in zip(flat, before, strict=True))
        for arrays, copies in zip(seen, snapshot, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(arrays, copies, strict=True))


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


@pytest.mark.host
@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_nothing_is_compiled_while_a_lock_is_held(monkeypatch, shard_optimizer):
    """Neither by an apply, nor by a take of a mesh, nor by the update that follows."""
    from gradreduce.backends.sim.device import SimDevice

    asked = []
    with open_sim([0, 1, 2], kernels="compiled", peer_access=False) as mesh:
        variable = gr.Variable(np.zeros(3, np.float16), device=mesh)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        optimizer = gr.MomentumOptimizer(0.1, 0.9)
        step = gr.SyncStep([variable], optimizer, ops, shard_optimizer=shard_optimizer)
        (accumulator,) = step.accumulators
        original = SimDevice._compile_kernel

        def prepare(self, *arguments):
            asked.append(accumulator.accumulator_ref.lock._is_owned())
            original(self, *arguments)

        monkeypatch.setattr(SimDevice, "_compile_kernel", prepare)
        accumulator.apply_grad(np.ones(3), cast=True)
        assert step([[[np.ones(3, np.float16)]]] * 3)
    assert asked
    assert not any(asked)


def changed_terms(change):
    terms = make_terms()
    change(terms)
    return terms


BAD = {
    "replicas": (lambda terms: terms.pop(), "terms has 3 entries; expected 4, one per device"),
    "variables": (lambda terms: terms[2].pop(), r"terms\[2\] has 3 entries; expected 4"),
    "shape": (
        lambda terms: terms[1][0].__setitem__(2, np.zeros((2, 2), np.float32)),
        r"terms of replica 1 for 'v0': got float32\[2, 2\], expected float32\[64, 32\]",
    ),
    "dtype": (
        lambda terms: terms[3][1].__setitem__(0, np.zeros(32, np.float64)),
        "terms of replica 3 for 'v1': got float64",
    ),
    "empty": (lambda terms: terms[0][0].clear(), "a list of at least one gradient"),
    "some None": (lambda terms: terms[0].__setitem__(0, None), "or None on every replica"),
    "an array, no list": (
        lambda terms: terms[0].__setitem__(1, np.zeros(32, np.float32)), "a list of at least one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_terms_raise_and_change_nothing(what):
    change, text = BAD[what]
    with open_sim(4) as mesh:
        variables, step = make_step(mesh)
        before = [variable.numpy() for variable in variables]
        with mesh.journal() as journal, pytest.raises(ValueError, match=text):
            step(changed_terms(change))
        assert journal.records == []
        assert step.global_step == 0
        assert [accumulator.num_accumulated() for accumulator in step.accumulators] == [0] * 4
        for variable, value in zip(variables, before, strict=True):
            assert np.array_equal(variable.numpy(), value)


def test_all_none_is_an_error():
    with open_sim(2) as mesh:
        variable = gr.Variable([1.0, 2.0], device=mesh)
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
        step = gr.SyncStep([variable], gr.MomentumOptimizer(0.1, 0.9), ops)
        with pytest.raises(ValueError, match="No gradients provided"):
            step([[None], [None]])


def test_steps_and_numbers_may_be_variables():
    with open_sim(2) as mesh:
        number = gr.Variable(4, trainable=False, device=mesh.devices[1])
        variables, step = make_small_step(mesh, num_required=number)
        count = gr.Variable(0, "global_step", trainable=False, device=mesh)
        terms = [[[np.ones(2, np.float32)]]] * 2
        assert [step(terms, count), step(terms, count)] == [False, True]
        assert step.global_step == 1
        assert not step(terms, count)  # stale
        assert step.accumulators[0].num_dropped == 2
        count.assign_add(1)
        assert [step(terms, count), step(terms, count)] == [False, True]
        assert variables[0].numpy().tolist() == [-2.0, -2.0]
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
            assert same_on_all(half, np.full(2, -3.0 * (turn + 1), "float16"))
    assert seen == [{"float32"}] * 2


def same_on_all(variable, wanted):
    return all(np.array_equal(buffer.numpy(), wanted) for buffer in variable.buffers)


def make_small_step(mesh, ops=None, **options):
    variables = [gr.Variable(np.zeros(2, np.float32), "v", device=mesh)]
    ops = ops or gr.HierarchicalCopyAllReduce(mesh=mesh)
    return variables, gr.SyncStep(variables, gr.GradientDescentOptimizer(1.0), ops, **options)


def test_bad_construction():
    with open_sim(2) as mesh, open_sim(2) as other:
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
        optimizer = gr.MomentumOptimizer(0.1, 0.9)
        here = gr.Variable([1.0], device=mesh)
        there = gr.Variable([1.0], device=other)
        counter = gr.Variable(0, trainable=False, device=mesh)
        for variables, text in (
            ([], "No variables provided"),
            ([here, there], "are on different devices"),
            ([here, here], "variables contains <Variable .* more than once"),
            ([counter], "not trainable"),
        ):
            with pytest.raises(ValueError, match=text):
                gr.SyncStep(variables, optimizer, ops)
        with pytest.raises(TypeError, match=r"variables\[0\] is ndarray.*, not a Variable"):
            gr.SyncStep([np.zeros(1)], optimizer, ops)
        with pytest.raises(TypeError, match=r"optimizer=.* is not an Optimizer"):
            gr.SyncStep([here], ops, optimizer)
        with pytest.raises(TypeError, match=r"^cross_device_ops=3 is not a CrossDeviceOps"):
            gr.SyncStep([here], optimizer, 3)
        with pytest.raises(ValueError, match="num_required must be positive, but was 0"):
            gr.SyncStep([here], optimizer, ops, num_required=0)
        with pytest.raises(TypeError, match=r"num_required=2\.5 must be an integer"):
            gr.SyncStep([here], optimizer, ops, num_required=2.5)
        with pytest.raises(ValueError, match="Invalid aggregation_method"):
            gr.SyncStep([here], optimizer, ops, aggregation_method=3)
