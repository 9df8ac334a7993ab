"""Steps with exact sums: one training has the same bits on any layout of its micro-batches."""

import hashlib
import warnings
from functools import cache

import numpy as np
import pytest
from support.exact_data import same
from support.exact_sums import exact_means
from support.exhaustive import seeds
from support.thread_group import run_replicas

import gradreduce as gr
from gradreduce.backends.sim.device import SimDevice, memory_of
from gradreduce.device import Buffer, as_dtype

FORMS = {"w": ((5, 3), "float32"), "half": ((37,), "bfloat16"), "bias": ((), "float32"),
         "wide": ((7,), "float64")}  # fmt: skip
NUM_TERMS, NUM_UPDATES = 24, 3
LAYOUTS = (1, 2, 3, 4, 8)  # replicas
CLIP = {"clip_norm": 0.5}
EVERYWHERE = {1: [(0,)], 2: [(0, 0), (0, 1)], 3: [(0, 1, 1), (0, 1, 2)],
              4: [(0, 0, 1, 1), (0, 1, 1, 2)], 8: [(0,) * 8, (0, 1, 2, 3, 0, 1, 2, 3)]}  # fmt: skip


@cache
def micro_batches(update):
    """``[term][variable]``: numbers of several magnitudes, whose sums are inexact in float32."""
    rng = np.random.default_rng(update)
    return [
        [(rng.normal(size=shape) * np.exp2(rng.integers(-9, 5, shape))).astype(as_dtype(dtype))
         for shape, dtype in FORMS.values()]
        for _ in range(NUM_TERMS)
    ]  # fmt: skip


def make_step(mesh, num_packs=1, *, exact=True, **options):
    variables = [gr.Variable(np.ones(shape), name, dtype=as_dtype(dtype), device=mesh)
                 for name, (shape, dtype) in FORMS.items()]  # fmt: skip
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs, mesh=mesh, exact=exact)
    return gr.SyncStep(variables, gr.MomentumOptimizer(0.1, 0.9), ops, **options)


def split(luck, num_replicas, num_calls):
    """The numbers of the terms of each replica in each call, some of which have none."""
    order = luck.permutation(NUM_TERMS)
    cuts = np.sort(luck.integers(0, NUM_TERMS + 1, num_replicas * num_calls - 1))
    rows = iter(np.split(order, cuts))
    made = [[list(next(rows)) for _ in range(num_replicas)] for _ in range(num_calls)]
    return [call if any(call) else None for call in made]


def call_of(terms, numbers, weights=None):
    """The arguments of a call: terms and weights of each replica; None if it has none."""
    rows = [[[terms[at][place] for at in row] for place in range(len(FORMS))] if row else None
            for row in numbers]  # fmt: skip
    return rows, [[1 if weights is None else weights[at] for at in row] or [0] for row in numbers]


def run_step(step, luck, num_calls, updates=range(NUM_UPDATES), weights=None):
    """Trains with random splits of all micro-batches."""
    count = len(step.devices)
    for update in updates:
        calls = []
        while not calls or None in calls:  # a call needs a gradient for the first one
            calls = split(luck, count, num_calls)
        for number, numbers in enumerate(calls, 1):
            rows, by = call_of(micro_batches(update), numbers, weights)
            assert step(rows, weights=by) is (number == num_calls)


def digest(step):
    for variable in step.variables:
        assert len({buffer.numpy().tobytes() for buffer in variable.buffers}) == 1
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in step.variables)).hexdigest()


def trained(luck, num_replicas, weights=None, exact=True, **options):
    """The digest of a training on a random layout with so many replicas."""
    placements = EVERYWHERE[num_replicas]
    placement, num_calls = placements[luck.integers(len(placements))], int(luck.integers(1, 4))
    options["num_required"] = num_replicas * num_calls
    with gr.open_mesh(
        placement, backend="sim", strict=True, peer_access=bool(luck.integers(2))
    ) as mesh:
        step = make_step(mesh, (0, 1, 3)[luck.integers(3)], exact=exact, **options)
        run_step(step, luck, num_calls, weights=weights)
        return digest(step)


@cache
def on_one_replica(**options):
    return trained(np.random.default_rng(9), 1, **options)


WEIGHTS = tuple(np.random.default_rng(1).choice([0.25, 1, 3, 0.7, 1e-3], NUM_TERMS).tolist())
# The largest float64; as two numbers of float32 the largest one and a NaN.
LARGEST = 0x7FEFFFFF7F7FFFFF
WAYS = (
    {}, {"shard_optimizer": True}, {"check_finite": True},
    {"check_finite": True, "shard_optimizer": True},
    {"aggregation_method": gr.AggregationMethod.EXPERIMENTAL_TREE},
    {"weights": WEIGHTS}, {"weights": WEIGHTS, "shard_optimizer": True}, CLIP,
)  # fmt: skip


@pytest.mark.parametrize("seed", seeds(2, 20))
@pytest.mark.parametrize("num_replicas", LAYOUTS)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_any_layout_has_the_bits_of_one_replica(way, num_replicas, seed):
    """Weights need not be whole; steps that are clipped have the same bits too."""
    options = WAYS[way]
    changes = {key: options[key] for key in ("weights", "clip_norm") if key in options}
    wanted = on_one_replica(**changes)
    assert not changes or wanted != on_one_replica()
    for luck in (np.random.default_rng([num_replicas, turn]) for turn in seed):
        assert trained(luck, num_replicas, **options) == wanted


def test_without_it_layouts_differ():
    luck = np.random.default_rng(5)
    assert len({trained(luck, count, exact=False) for count in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=str)
@pytest.mark.parametrize("num_calls", [1, 2])
def test_without_weights_a_mean_divides_by_the_number_of_gradients(options, num_calls):
    """One of each replica in each call, however many terms it has; SGD shows the mean."""
    terms = [[each.astype(np.float32) for each in row] for row in micro_batches(0)]
    with gr.open_mesh((0, 1, 1), backend="sim", strict=True) as mesh:
        made = gr.Variable(np.zeros((5, 3), np.float32), "w", device=mesh)
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        step = gr.SyncStep([made], gr.GradientDescentOptimizer(1.0), ops,
                           num_required=3 * num_calls, **options)  # fmt: skip
        rows = np.array_split(np.random.default_rng(3).permutation(NUM_TERMS), 3 * num_calls)
        for number in range(num_calls):
            here = rows[3 * number : 3 * number + 3]
            step([[[terms[at][0] for at in row]] for row in here])
        wanted = exact_means([row[0] for row in terms], 3 * num_calls, np.float32)
        assert same(made.numpy(), 0 - wanted)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=str)
def test_a_state_in_the_middle_of_an_update_goes_on_with_the_same_bits(options):
    luck = np.random.default_rng(2)
    with gr.open_mesh((0, 1, 1), backend="sim", strict=True) as mesh:
        step, other = [make_step(mesh, num_required=6, **options) for _ in range(2)]
        run_step(step, luck, 2, range(2))
        first = call_of(micro_batches(2), [list(range(9)), [], list(range(9, 12))])
        second = call_of(micro_batches(2), [[], list(range(12, 24)), []])
        assert not step(first[0], weights=first[1])
        state = step.state_dict()
        formats = {each["format"] for each in state["accumulators"].values()}
        assert formats == {"gradreduce exact accumulator 1"}
        other.load_state_dict(state)
        for each in (step, other):
            assert each(second[0], weights=second[1])
            assert digest(each) == on_one_replica()
        rounded = make_step(mesh, num_required=6, exact=False, **options)
        with pytest.raises(ValueError, match="expected 'gradreduce dense accumulator 1'"):
            rounded.load_state_dict(state)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, CLIP], ids=str)
def test_a_sum_that_does_not_fit_warns_after_the_update_and_names_the_variable(options):
    with gr.open_mesh((0, 1), backend="sim", strict=True) as mesh:
        step = make_step(mesh, **options)
        before = step.variables[2].numpy()
        terms = [[np.float32(each)] for each in (1, 2.0**-30, 2.0**-60, 2.0**-90)]
        rows = [[None, None, [each[0] for each in terms], None]] * 2
        with pytest.warns(gr.InexactSumWarning, match="'bias'") as caught:
            assert step(rows)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert step.variables[2].numpy() != before
        assert step([[None, None, [np.float32(1)], None]] * 2)


def test_a_step_has_no_wait_of_its_own_and_as_many_launches_for_any_number_of_terms():
    """One launch of a GPU adds all terms, one adds the words of its replicas."""
    with gr.open_mesh((0, 0, 1), backend="sim", strict=True) as mesh:
        step = make_step(mesh)
        counts = []
        for num_terms in (1, 5):
            terms = micro_batches(0)[:num_terms]
            rows = [[[np.asarray(row[place]) for row in terms] for place in range(4)]] * 3
            with mesh.journal() as journal:
                assert step(rows)
            assert journal.syncs == 0
            counts.append([each.name for each in journal.records if each.kind == "launch"])
        assert counts[0] == counts[1]
        assert counts[0].count("add_words") == 6  # of three dtypes, on two GPUs


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("counts", [(3,), (3, 1)], ids=str)
def test_what_memory_held_before_sets_no_flag(counts, dtype, monkeypatch):
    """Sums are added with the gaps between them, which hold the largest numbers here."""
    allocate = SimDevice._allocate

    def filled(device, nbytes):
        block = allocate(device, nbytes)
        memory_of(Buffer(block, 0, (nbytes // 8,), as_dtype("int64"))).fill(LARGEST)
        return block

    def work(mesh, replicas):
        made = [gr.Variable(np.ones(size), f"v{size}", dtype=dtype, device=mesh) for size in (1, 3)]
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, exact=True)
        step = gr.SyncStep(made, gr.GradientDescentOptimizer(1.0), ops)
        monkeypatch.setattr(SimDevice, "_allocate", filled)
        assert step([[[np.ones(size, dtype)] for size in (1, 3)]] * len(replicas))
        assert made[1].numpy().tolist() == [0, 0, 0]

    with warnings.catch_warnings(action="error"):
        run_replicas(counts, work, strict=False)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=str)
def test_a_replica_without_terms_changes_no_mean_of_minus_zero(options):
    """The mean is -0.0, and -0.0 minus that is +0.0."""
    with gr.open_mesh((0, 1, 1), backend="sim", strict=True) as mesh:
        minus = np.full((5, 3), -0.0, np.float32)
        made = gr.Variable(minus, "w", device=mesh)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, exact=True)
        step = gr.SyncStep([made], gr.GradientDescentOptimizer(1.0), ops, **options)
        assert step([[[minus, minus]], None, [[minus]]], weights=[[1, 2], 0, 0.5])
        assert same(made.numpy(), np.zeros((5, 3), np.float32))


def test_a_wire_that_rounds_is_refused():
    with gr.open_mesh(2, backend="sim") as mesh:
        wide = gr.Variable(np.ones(4), "wide", device=mesh)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, exact=True, wire_dtype="float32")
        with pytest.raises(ValueError) as raised:
            gr.SyncStep([wide], gr.GradientDescentOptimizer(0.1), ops)
        assert str(raised.value) == (
            "the gradient of 'wide': wire_dtype='float32' cannot be combined with exact=True for "
            "float64: terms would be rounded on the way; pass None"
        )


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_term_that_is_not_finite_adds_nothing(is_weighted):
    """Not the sum of a replica: it may be finite, or overflow although that of all does not."""
    with gr.open_mesh((0, 1), backend="sim", strict=True) as mesh:
        made = gr.Variable(np.zeros(3, np.float16), "w", device=mesh)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, exact=True)
        optimizer = gr.GradientDescentOptimizer(1.0)
        step = gr.SyncStep([made], optimizer, ops, check_finite=True)
        weights = [[1, 1], [1, 0.5]] if is_weighted else None
        large, one = np.full(3, 60000, np.float16), np.full(3, 1, np.float16)
        for wrong in (one * np.float16(np.inf), one * np.float16(np.nan)):
            with pytest.raises(FloatingPointError, match="'w' in replica 1 is not finite"):
                step([[[one, one]], [[one, wrong]]], weights=weights)
        assert (step.global_step, step.accumulators[0].num_accumulated()) == (0, 0)
        with mesh.journal() as journal:
            assert step([[[large, large]], [[-large, -2 * one]]], weights=weights)
        assert [each.name for each in journal.of("launch")].count("scale") == is_weighted
        wanted = (59999 / 3.5) if is_weighted else (59998 / 2)
        assert same(made.numpy(), np.full(3, -np.float16(wanted)))


def test_a_product_that_is_not_finite_adds_nothing():
    with gr.open_mesh((0, 1), backend="sim", strict=True) as mesh:
        step = make_step(mesh, check_finite=True)
        rows = [[None, None, [np.float32(each)], None] for each in (1, 3e38)]
        with pytest.raises(FloatingPointError, match="'bias' in replica 1 is not finite"):
            step(rows, weights=[1, 2])
        assert step(rows, weights=[1, 0.5])
