"""One law for all-reduces: sums that are exact have the bits of the definition on any layout.

With ``exact=True`` all sums are, rounded once; without it, those of small whole numbers.
"""

import warnings
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exact_data import same
from support.exact_sums import (
    adversarial_terms,
    exact_means,
    exact_reduction,
    exact_sums,
    exact_terms,
    may_warn,
)  # fmt: skip
from support.exhaustive import examples
from support.meshes import implementation
from support.thread_group import run_replicas

import gradreduce as gr
from gradreduce.backends.sim.device import SimDevice

__all__ = ["implementation"]

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
DTYPES = ("float16", "bfloat16", "float32", "complex64", "float64", "complex128", "int16")
SHAPES = ((6,), (18, 2), (0, 6), (702,))  # of gradients; the rows are multiples of 1, 2, 3, 6
PACKING = (
    {"num_packs": 1}, {"num_packs": 3}, {"num_packs": 0},
    {"num_packs": 0, "agg_small_grads_max_bytes": 200}, {"wire_dtype": "float32"},
)  # fmt: skip
PLACEMENTS = {1: [(0,)], 2: [(0, 0), (0, 1)], 3: [(0, 0, 0), (0, 1, 1), (0, 1, 2)],
              6: [(0,) * 6, (0, 0, 1, 1, 2, 2), (0, 1, 1, 2, 0, 3)]}  # fmt: skip
SPLITS = {1: [(1,)], 2: [(2,), (1, 1)], 3: [(3,), (1, 2), (2, 1), (1, 1, 1)],
          6: [(6,), (1, 5), (3, 3), (2, 1, 3), (1, 1, 2, 2), (1,) * 6]}  # fmt: skip
TENTH = float(np.float32(0.1))  # its products with float32 are exact in float64
WEIGHTS = {"of integers": [0, 1, 2, 3], True: [0, 1, 0.5, 3, TENTH], False: [0, 1, 2, 7, 0.5, 4096]}
EXACT = gr.HierarchicalCopyAllReduce(exact=True)


def terms_of(num_replicas, dtypes, seed, exact=True):
    """``[replica][tensor]``."""
    columns = [
        exact_terms(num_replicas, shape, dtype, 9 * seed + number, rounded=not exact)
        for number, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def all_reduced(ops, grads, op, weights):
    return ops.all_reduce(grads, op, weights=weights)


def in_place(ops, grads, op, weights):
    """Where the results have the dtypes of the gradients."""
    own = [[each.copy() for each in row] for row in grads]
    to_float = [op is MEAN and each.dtype.kind == "i" for each in grads[0]]
    out = [[np.empty(each.shape, np.float32) if new else each
            for each, new in zip(row, to_float, strict=True)] for row in own]  # fmt: skip
    assert ops.all_reduce(own, op, weights=weights, out=out) is out
    return out


def batch_reduced(ops, grads, op, weights):
    values = [gr.PerReplica(list(column), ops.mesh) for column in zip(*grads, strict=True)]
    found = ops.batch_reduce(op, [(each, each) for each in values], weights=weights)
    return [list(row) for row in zip(*[each.values for each in found], strict=True)]


def on_one_device(ops, grads, op, weights):
    """Each value on a device of its own choice; every replica has this result."""
    values = [gr.PerReplica(list(column), ops.mesh) for column in zip(*grads, strict=True)]
    homes = [ops.mesh[number % len(ops.mesh)] for number in range(len(values))]
    found = ops.batch_reduce(op, [*zip(values, homes, strict=True)], weights=weights)
    return [[each.values[0] for each in found]] * len(grads)


def from_flat_buffers(ops, grads, op, weights):
    """Tensors that are not packed without weights; they are not written."""
    flat = ops.mesh.flat_buffer([each.shape for each in grads[0]], grads[0][0].dtype)
    for view, each in zip(chain(*flat.views), chain(*grads), strict=True):
        view.device.upload(each, out=view)
    found = ops.all_reduce([list(row) for row in flat.views], op, weights=weights)
    assert all(map(same, [view.numpy() for view in chain(*flat.views)], chain(*grads)))
    return [[each.numpy() for each in row] for row in found]


def scattered(ops, grads, op, weights):
    """Each replica has a part, as many rows each; in one process they are joined."""
    rows = ops.reduce_scatter(grads, op, weights=weights)
    if ops.mesh.num_replicas > len(ops.mesh):
        return [list(row) for row in rows]
    return [[np.concatenate(parts) for parts in zip(*rows, strict=True)]] * len(grads)


CALLS = (all_reduced, in_place, batch_reduced, on_one_device, scattered)


@st.composite
def cases(draw):
    """What is added: ``exact``, the call, the reduction, weights, dtypes and a seed."""
    exact, call = draw(st.booleans()), draw(st.sampled_from([*CALLS, from_flat_buffers]))
    count, op = draw(st.sampled_from([*PLACEMENTS])), draw(st.sampled_from([SUM, MEAN]))
    dtypes, weights = draw(st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4)), None
    if call is from_flat_buffers:
        dtypes = dtypes[:1] * 4
    if draw(st.booleans()):
        some = st.sampled_from(WEIGHTS["of integers" if "int16" in dtypes else exact])
        weights = draw(st.lists(some, min_size=count, max_size=count).filter(any))
        dtypes = ["float16" if op is MEAN and each == "int16" else each for each in dtypes]
    return exact, call, op, weights or [1] * count, dtypes, draw(st.integers(0, 9999))


@st.composite
def settings_of(draw, exact, dtypes):
    """The algorithm, and packings that round no term on its way."""
    packing = draw(st.sampled_from(PACKING[:-1] if "float64" in dtypes else PACKING))
    if exact:
        return {"exact": True, "words": draw(st.sampled_from([2, 3, 8])), **packing}
    return {"all_reduce_alg": draw(st.sampled_from(["nccl", "hierarchical_copy"])), **packing}


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_every_layout_has_the_bits_of_the_definition(implementation, data):
    """Placements, processes, packs, calls and orders of the replicas; or the call warns."""
    exact, call, op, weights, dtypes, seed = data.draw(cases(), "case")
    count, grads = len(weights), terms_of(len(weights), dtypes, seed, exact)
    columns = [*zip(*grads, strict=True)]
    wanted = [exact_reduction(column, weights, mean=op is MEAN) for column in columns]
    may_warn_of = [exact and may_warn(column, weights) for column in columns]
    for each in chain(*[row for row, weight in zip(grads, weights, strict=True) if not weight]):
        each.fill(np.nan if each.dtype.kind != "i" else 1)  # is not read
    for _ in range(2):
        order = data.draw(st.permutations(range(count)), "order")
        split = data.draw(st.sampled_from(SPLITS[count]), "replicas of each process")
        placement = data.draw(st.sampled_from(PLACEMENTS[count]), "placement")
        options = data.draw(settings_of(exact, dtypes), "settings")

        def work(mesh, replicas, order=order, options=options):
            own = [order[number] for number in replicas]
            by = [weights[number] for number in own] if set(weights) != {1} else None
            ops = gr.AllReduceCrossDeviceOps(mesh=mesh, **options)
            return call(ops, [grads[number] for number in own], op, by)

        peers = data.draw(st.booleans(), "peers")
        with warnings.catch_warnings(record=True, action="always") as caught:
            rows = run_replicas(
                split,
                work,
                placement if len(split) == 1 else None,
                kernels=implementation,
                peer_access=peers,
            )
        found = [*chain(*rows)]
        if call is scattered and len(split) > 1:
            found = [[np.concatenate(parts) for parts in zip(*found, strict=True)]]
        assert {each.category for each in caught} <= {gr.InexactSumWarning}
        many = exact and len(split) > 1 and max(split) > options.get("words", count)
        may_differ = [many or each for each in may_warn_of]
        assert bool(caught) <= any(may_differ)
        for row in found:
            for each, right, differs in zip(row, wanted, may_differ, strict=True):
                assert (differs and caught) or same(each, right)


@pytest.fixture(
    params=[((0, 0, 1, 2), True), ((0, 0, 1, 2), False), ((0,) * 4, True)],
    ids=["peers", "copies", "one"],
)
def mesh(request):
    placement, peer_access = request.param
    with gr.open_mesh(placement, backend="sim", peer_access=peer_access, strict=True) as opened:
        yield opened


def small(dtype=np.float32, size=12):
    return [[np.full(size, each, dtype), np.full((4, 3), each, dtype)] for each in range(1, 5)]


def operations(journal):
    return [(each.kind, each.name) for each in journal.records if each.kind in ("launch", "copy")]


def test_every_call_adds_real_numbers(mesh):
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
    grads = [[np.full(4, term, np.float32)] for term in (1e8, 0.5, -1e8, 0.25)]
    for call in CALLS:
        for op, wanted in ((SUM, 0.75), (MEAN, 0.75 / 4)):
            for row in call(ops, grads, op, None):
                assert row[0].tolist() == [wanted] * 4, call.__name__


def test_large_packs_are_divided_among_the_devices(mesh):
    grads = [[term] for term in adversarial_terms(4, 40_000, "float32", 5)]
    wanted = exact_sums([row[0] for row in grads])
    with mesh.journal() as journal:
        found = gr.all_reduce(grads, SUM, mesh=mesh, exact=True)
    assert all(same(row[0], wanted) for row in found)
    names = [each.name for each in journal.records if each.kind == "launch"]
    assert names.count("exact_sum") == len({device.physical for device in mesh})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_peers_and_one_gpu_have_as_many_operations_as_a_plain_reduction(mesh, dtype):
    """Without peers no group is added on its own device: its launch is saved."""
    counts = {}
    for exact in (False, True):
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, exact=exact)
        pairs = ops.pairs(small(dtype))
        with mesh.journal() as journal:
            ops.batch_reduce(SUM, pairs)
        plan = ops.plan(SUM, pairs)
        assert (plan.launches, plan.copies) == (journal.launches, journal.copies)
        counts[exact] = plan.launches
        names = {name for kind, name in operations(journal) if kind == "launch"}
        assert ("exact_sum" in names) is exact
        assert ("all_sum" in names) is (not exact)
    assert counts[True] <= counts[False]


def test_without_it_nothing_changes(mesh):
    """The launches, the algorithm and the text of the object."""
    assert gr.AllReduceCrossDeviceOps().all_reduce_alg == "nccl"
    assert EXACT.all_reduce_alg == gr.AllReduceCrossDeviceOps(exact=True).all_reduce_alg
    assert EXACT.exact
    assert EXACT.words == 3
    assert repr(gr.AllReduceCrossDeviceOps(exact=True, words=np.int64(4))).endswith(", words=4>")
    assert repr(EXACT) == "<HierarchicalCopyAllReduce hierarchical_copy, num_packs=1, exact=True>"
    assert repr(gr.NcclAllReduce()) == "<NcclAllReduce nccl, num_packs=1>"
    found = []
    for options in ({}, {"exact": False}):
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh, **options)
        with mesh.journal() as journal:
            ops.all_reduce(small())
            ops.reduce_scatter([row[1:] for row in small()])
            ops.reduce(SUM, gr.PerReplica([row[0] for row in small()], mesh), mesh[0])
        found.append(operations(journal))
    assert found[0] == found[1]
    assert ("launch", "exact_sum") not in found[0]
    assert ("launch", "all_sum") in found[0]


@pytest.mark.parametrize("make", ["prepare", "capture"])
def test_prepared_and_captured_steps_are_exact(make):
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True) as mesh:
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        grads = [[np.zeros(50, np.float32)] for _ in mesh]
        step = getattr(ops, make)(MEAN, ops.pairs(grads))
        for seed in range(2):
            terms = adversarial_terms(3, 50, "float32", seed)
            for (grad,), term in zip(grads, terms, strict=True):
                grad[:] = term
            (result,) = step()
            assert all(same(each, exact_means(terms, 3)) for each in result.values)


def test_a_replica_with_weight_0_changes_no_sum_of_minus_zero(mesh):
    minus = [[np.full(5, -0.0, np.float16)] for _ in mesh]
    weights = [1, 0, 3, 0]
    for call in CALLS[:4]:
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        for row in call(ops, minus, SUM, weights):
            assert same(row[0], minus[0][0]), call.__name__


def test_a_sum_of_weighted_16_bit_terms_is_rounded_once(mesh):
    grads = [[np.full(4, each, np.float16)] for each in (1, 2.0**-11, 2.0**-24, 0)]
    weights = [1, 1, 2.0**-20, 1]
    for call in CALLS:
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
        for row in call(ops, grads, SUM, weights):
            assert row[0].tolist() == [1 + 2.0**-10] * 4, call.__name__


# ---- what is refused ----------------------------------------------------------------------------

NARROW = (
    "wire_dtype='float32' cannot be combined with exact=True for float64: terms would be rounded "
    "on the way; pass None"
)
DENSE = (
    "exact=True does not support IndexedSlices in this call: pass .to_dense() if no index is "
    "repeated, or use a SparseConditionalAccumulator with exact=True"
)


def slices():
    return gr.IndexedSlices(np.ones((1, 3), np.float32), [0], (4, 3))


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [(slices, {}, DENSE), (lambda: np.ones((4, 3)), {"wire_dtype": "float32"}, NARROW)],
    ids=["slices", "wire"],
)
def test_what_cannot_be_added_exactly_is_refused_before_a_launch(mesh, make, options, text):
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True, **options)
    grads = [{"a": np.ones(4, np.float32), "b": make()} for _ in mesh]
    value = gr.PerReplica([make() for _ in mesh], mesh)
    weights = [0.5] * len(mesh)
    named = [
        lambda: ops.all_reduce(grads),
        lambda: ops.all_reduce(grads, weights=weights),
        lambda: gr.all_reduce(grads, mesh=mesh, exact=True, **options),
        lambda: ops.plan(SUM, ops.pairs(grads)),
        lambda: ops.profile(SUM, ops.pairs(grads)),
        lambda: ops.prepare(SUM, ops.pairs(grads)),
        lambda: ops.capture(SUM, ops.pairs(grads)),
    ]
    if options:
        named.append(lambda: ops.reduce_scatter(grads))
    unnamed = [
        lambda: ops.reduce(MEAN, value, mesh[0]),
        lambda: ops.reduce(SUM, value, value, weights=weights),
        lambda: ops.batch_reduce(SUM, [(value, mesh)]),
    ]
    with mesh.journal() as journal:
        for calls, name in ((named, "grads[…]['b']"), (unnamed, "value 0")):
            for call in calls:
                with pytest.raises(ValueError) as raised:
                    call()
                assert str(raised.value) == f"{name}: {text}"
    assert operations(journal) == []


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_a_sum_of_float64_that_does_not_fit_warns_in_every_call(mesh, dtype):
    """And names the tensor. A captured step could not."""
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
    most = np.finfo(np.float64).max
    grads = [{"fits": np.ones(4), "b": np.full(4, most, dtype)} for _ in mesh]
    for call in CALLS:
        rows = [list(row.values()) for row in grads]
        with pytest.warns(gr.InexactSumWarning, match="did not fit") as caught:
            call(ops, rows, SUM, None)
        assert "None" not in str(caught[0].message)
    pairs = ops.pairs(grads)
    step = ops.prepare(SUM, pairs[1:])
    for _ in range(2):
        with pytest.warns(gr.InexactSumWarning, match="tensor b"):
            step()
        mesh.mesh_state.fail("planted")
        mesh.reset(timeout=30)
    for row in grads:
        row["b"][:] = -3
    with mesh.journal() as journal:
        assert step()[0].values[0].tolist() == [-12] * 4
    assert [each.kind for each in journal.records].count("fill") >= 1
    with mesh.journal() as journal, pytest.raises(ValueError) as raised:
        ops.capture(SUM, pairs[1:])
    assert str(raised.value) == (
        f"grads[…]['b'] is {dtype}: a captured step cannot warn of exact sums that do not fit into "
        "their words; use prepare"
    )
    assert operations(journal) == []


@pytest.mark.parametrize("num_packs", [1, 3])
def test_in_place_nothing_is_allocated_after_the_first_launch(num_packs, monkeypatch):
    """So a failed allocation leaves the arrays unchanged: float64 has flags on each device."""
    with gr.open_mesh((0, 1, 1), backend="sim", strict=True) as mesh:
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, exact=True, num_packs=num_packs)
        own = [[device.upload(np.ones(size)) for size in (9000, 7, 9000)] for device in mesh]
        allocate, before = SimDevice._allocate, []
        with mesh.journal() as journal, monkeypatch.context() as patch:
            patch.setattr(
                SimDevice, "_allocate", lambda *given: before.append(len(journal.of("launch")))
                or allocate(*given),
            )  # fmt: skip
            ops.all_reduce(own, SUM, out=own)
        assert journal.of("copy") == []
        assert {each.device for each in journal.of("launch")} == {0, 1}
        assert set(before) == {0}
        assert (own[2][0].numpy() == 3).all()


NCCL = (
    "all_reduce_alg='nccl' cannot be combined with exact=True: NCCL rounds each addition; pass "
    "'hierarchical_copy', or None"
)
WIRE = (
    "wire_dtype='{}' cannot be combined with exact=True: terms would be rounded on the way; pass "
    "'float32', or None"
)
GROUPS = (
    "reduction_groups=((0,), (1,)) cannot be combined with exact=True: an exact sum has no order, "
    "so groups change nothing"
)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"all_reduce_alg": "nccl"}, ValueError, NCCL),
        ({"wire_dtype": "float16"}, ValueError, WIRE.format("float16")),
        ({"wire_dtype": "bfloat16"}, ValueError, WIRE.format("bfloat16")),
        ({"reduction_groups": [[0], [1]]}, ValueError, GROUPS),
        ({"exact": 1}, TypeError, "exact=1 must be True or False"),
        ({"words": 1}, ValueError, "words=1 must be at least 2, and at most 8"),
        ({"words": 9}, ValueError, "words=9 must be at least 2, and at most 8"),
        ({"words": 2.0}, ValueError, "words=2.0 must be a non-negative integer"),
        ({"words": True}, ValueError, "words=True must be a non-negative integer"),
        ({"words": 4, "exact": False}, ValueError, "words=4 is only for exact=True"),
    ],
)
def test_settings_that_round_are_refused(options, error, text):
    with pytest.raises(error) as raised:
        gr.AllReduceCrossDeviceOps(**{"exact": True, **options})
    assert str(raised.value) == text


class Overridden(gr.AllReduceCrossDeviceOps):
    def reduce_batch(self, *arguments, **options):
        raise AssertionError


def test_accumulators_are_exact_if_what_adds_them_is(mesh):
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
    wrong = [
        (gr.ConditionalAccumulator, {"cross_device_ops": ops}, "exact=True, but .* exact=False"),
        (gr.SparseConditionalAccumulator, {"cross_device_ops": ops}, "exact=True, but .* exact="),
        (gr.ConditionalAccumulator,
         {"cross_device_ops": gr.AllReduceCrossDeviceOps(mesh=mesh), "exact": True},
         "exact=False, but the accumulator has exact=True"),
        (gr.SparseConditionalAccumulator,
         {"cross_device_ops": gr.AllReduceCrossDeviceOps(mesh=mesh), "exact": True},
         "exact=False, but the accumulator has exact=True"),
        (gr.ConditionalAccumulator,
         {"cross_device_ops": Overridden(mesh=mesh, exact=True), "exact": True},
         "overrides reduce_batch, which cannot add exact partial sums"),
    ]  # fmt: skip
    with mesh.journal() as journal:
        for make, options, text in wrong:
            with pytest.raises(ValueError, match=text):
                make("float32", device=mesh, **options)
    assert operations(journal) == []
