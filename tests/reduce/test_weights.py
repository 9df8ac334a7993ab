"""Weighted sums and means over replicas, in one process and over several (threads here)."""

from itertools import chain

import numpy as np
import pytest
from support.exact_data import random_data, same
from support.thread_group import run_replicas

import gradreduce as gr
from gradreduce.device import accumulate_dtype, as_dtype

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPES = ((5,), (3, 4), (0, 2), (700,))


@pytest.fixture(
    params=[((0, 0, 0), True), ((0, 1, 2), False), ((0, 1, 1), True)],
    ids=["one", "copies", "peers"],
)
def mesh(request):
    placement, peer_access = request.param
    with gr.open_mesh(placement, backend="sim", peer_access=peer_access, strict=True) as opened:
        yield opened


def made(num_replicas, dtype, seed=0):
    """``[replica][tensor]`` of small whole numbers, whose weighted sums are exact."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(-8, 9, shape).astype(as_dtype(dtype)) for shape in SHAPES]
        for _ in range(num_replicas)
    ]


def wanted(op, grads, weights):
    """The weighted sums or means, from the definition."""
    results = []
    for replicas in zip(*grads, strict=True):
        dtype = replicas[0].dtype
        acc, pairs = accumulate_dtype(dtype), zip(weights, replicas, strict=True)
        total = sum(np.float64(w) * each.astype("float64") for w, each in pairs)
        total = total.astype(acc)
        if op is MEAN:
            total = total / acc.type(sum(weights))
        with np.errstate(over="ignore"):  # infinite in float16
            results.append(total.astype(dtype))
    return results


@pytest.mark.parametrize("counts", [[2, 2], [1, 3], [4]], ids=str)
def test_several_processes_give_the_bits_of_one(counts):
    weights = [0.1, 3, 1e-3, 7]
    grads = [[random_data((103,), "float32", seed=index)] for index in range(4)]

    def work(mesh, replicas):
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        own = slice(replicas.start, replicas.stop)
        found = ops.all_reduce(grads[own], weights=weights[own])
        scattered = ops.reduce_scatter(
            [[each[0][:100]] for each in grads[own]], weights=weights[own]
        )
        return [(a[0], b[0]) for a, b in zip(found, scattered, strict=True)]

    (one,) = run_replicas([4], work)
    several = list(chain(*run_replicas(counts, work)))
    for replica, (whole, rows) in enumerate(several):
        assert same(whole, one[0][0])
        assert same(rows, whole[:100][25 * replica : 25 * replica + 25])


def test_weights_of_1_make_the_same_call(mesh):
    grads = made(3, "float16")
    for ops in (gr.HierarchicalCopyAllReduce(mesh=mesh), gr.NcclAllReduce(0, mesh=mesh)):
        runs = []
        for options in ({}, {"weights": [1, 1.0, np.float32(1)]}):
            with mesh.journal() as journal:
                found = ops.all_reduce(grads, **options)
            runs.append((found, [(each.kind, each.name, each.nbytes) for each in journal.records]))
        assert runs[0][1] == runs[1][1]
        assert all(map(same, chain(*runs[0][0]), chain(*runs[1][0])))


def test_the_pack_multiplies(mesh):
    """One launch replaces the pack of each device; nothing else is added."""
    grads = [[each.astype("float32") for each in row] for row in made(3, "float32")]
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    logs = []
    for options in ({}, {"weights": [2, 2, 2]}):
        with mesh.journal() as journal:
            ops.all_reduce(grads, **options)
        logs.append(
            [("pack" if each.name == "scale" else each.name, each.kind) for each in journal.records]
        )
    assert logs[0] == logs[1]
    assert {each.weight for each in journal.records} == {1, 2}


def test_a_replica_with_weight_0_is_not_read(mesh):
    full, ops = made(3, "float32"), gr.HierarchicalCopyAllReduce(mesh=mesh)
    grads = [{"a": row[0], "b": [row[1]]} for row in full]
    expected = ops.all_reduce(grads, weights=[2, 0, 3])
    for unread in (None, "anything", {"a": np.full(5, np.nan, "f4"), "b": [full[0][1] + np.inf]}):
        found = ops.all_reduce([grads[0], unread, grads[2]], weights=[2, 0, 3])
        for row, other in zip(found, expected, strict=True):
            assert same(row["a"], other["a"])
            assert same(row["b"][0], other["b"][0])
    first = ops.all_reduce([None, *grads[1:]], weights=[0, 2, 3], output_type=None)
    assert type(first[0]["a"]) is np.ndarray
    with pytest.raises(ValueError, match=r"grads\[0\] must be a list, tuple or dict"):
        ops.all_reduce([None, None, None], weights=[0, 0, 0])


def test_a_replica_with_weight_0_is_one_fill(mesh):
    grads = made(3, "float32")
    with mesh.journal() as journal:
        gr.HierarchicalCopyAllReduce(mesh=mesh).all_reduce(grads, weights=[2, 0, 3])
    assert len(journal.of("fill")) == 1


def test_a_product_of_16_bit_floats_does_not_overflow(mesh):
    grads = [[np.full(9, value, "float16")] for value in (100, 200, 300)]
    found = gr.all_reduce(grads, mesh=mesh, weights=[4096, 4096, 8192])
    assert same(found[0][0], np.full(9, 225, "float16"))


class Own(gr.CrossDeviceOps):
    """A caller's reduction, which knows nothing of weights."""

    def reduce_batch(self, reduce_op, requests, *, coalesce):
        assert reduce_op is SUM
        return gr.ReductionToOneDevice().reduce_batch(reduce_op, requests, coalesce=coalesce)


@pytest.mark.parametrize("op", [SUM, MEAN], ids=["sum", "mean"])
def test_other_reductions_scale_first(mesh, op):
    grads = made(3, "float16")
    expected = wanted(op, grads, [2, 1, 5])
    values = [gr.PerReplica(list(column), mesh) for column in zip(*grads, strict=True)]
    everywhere = [(value, mesh) for value in values]
    for ops, pairs in (
        (gr.ReductionToOneDevice(mesh=mesh), everywhere),
        (Own(), everywhere),
        (gr.HierarchicalCopyAllReduce(mesh=mesh), [(value, "sim:1") for value in values]),
    ):
        for result, total in zip(
            ops.batch_reduce(op, pairs, weights=[2, 1, 5]), expected, strict=True
        ):
            assert all(same(each, total) for each in result.values)


@pytest.mark.parametrize("counts", [[3], [1, 2]], ids=str)
def test_rows_are_scaled_and_divided_by_all_weights(counts):
    rows = [np.float16([[1, 2], [3, 4]]), np.float16([[5, 6]]), np.full((1, 2), np.nan, "f2")]
    grads = [gr.IndexedSlices(each, [2, 0][: len(each)], (4, 2)) for each in rows]

    def work(mesh, replicas):
        own = slice(replicas.start, replicas.stop)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        found = ops.all_reduce(
            [[each] for each in grads[own]], weights=[3, 1, 0][own], coalesce=True
        )
        return [(each[0].indices, each[0].values) for each in found]

    for indices, values in chain(*run_replicas(counts, work)):
        assert list(indices) == [0, 2]
        assert same(values, np.float16([[9 / 4, 3], [2, 3]]))


WRONG = [
    ([1, 2], MEAN, ValueError, "weights has 2 entries; expected 3, one per replica"),
    (3, MEAN, TypeError, "weights=3 must be a list with one number per replica"),
    ([1, -1, 1], MEAN, ValueError, "weights[1]=-1 must be a finite number of at least 0"),
    ([True, 1, 1], SUM, TypeError, "weights[0]=True must be a number on the host, of at least 0"),
    (
        [0, 0, 0], SUM, ValueError,
        "the sum of all weights is 0: at least one gradient must have a weight",
    ),
    ([1e308, 1e308, 1], MEAN, ValueError, "the sum of all weights exceeds the largest float64"),
]  # fmt: skip
OF_INTEGERS = [
    (
        [2, 1, 1], MEAN, ValueError,
        "grads[…][0] is int32: a mean of integers takes no weights; pass floats, or ReduceOp.SUM",
    ),
    (
        [1, 0.5, 1], SUM, ValueError,
        "weights[1]=0.5 of integers must be a whole number below 2**63: grads[…][0] is int32",
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_wrong_weights_launch_nothing(mesh, dtype):
    grads = [[np.ones(3, dtype)] for _ in range(3)]
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    for weights, op, kind, message in WRONG if dtype == "float32" else OF_INTEGERS:
        for call in (ops.all_reduce, ops.reduce_scatter):
            with mesh.journal() as journal, pytest.raises(kind) as caught:
                call(grads, op, weights=weights)
            assert str(caught.value) == message
            assert not journal.records
    value = gr.PerReplica([np.ones(3), np.ones(3)], devices=["sim:0", "sim:1"], mesh=mesh)
    whole = gr.PerReplica([each[0] for each in grads], mesh)
    with pytest.raises(ValueError) as caught:
        ops.batch_reduce(SUM, [(whole, whole), (value, value)], weights=[2, 1, 1])
    assert str(caught.value) == (
        "value 1 has 2 replicas, but weights has 3 entries, one per replica: make a call for each "
        "number of replicas"
    )


def test_all_processes_pass_weights_or_none():
    def work(mesh, replicas):
        weights = [2.0] if replicas.start else None
        with pytest.raises((ValueError, gr.errors.CollectiveError)) as caught:
            gr.all_reduce([[np.ones(3)]], mesh=mesh, weights=weights)
        return str(caught.value)

    errors = chain(*[[text] for text in run_replicas([1, 1], work)])
    assert any("weights" in each for each in errors)


def test_a_destination_may_be_all_devices_of_one_process_only():
    """The processes have one device and two; the result is for the first of each."""

    def work(mesh, replicas):
        value = gr.PerReplica([np.full(3, r + 1.0) for r in replicas], mesh)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        weights = [1, 2, 5][replicas.start : replicas.stop]
        return ops.reduce(MEAN, value, mesh[0], weights=weights).values

    for (found,) in run_replicas([1, 2], work):
        assert same(found, np.full(3, 20 / 8))
