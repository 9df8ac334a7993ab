"""``reduction_groups=``: groups other than the default, the first n // 2 and the rest."""

from __future__ import annotations

import random
import re
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from support.all_reduce_jobs import reduce_jobs
from support.compiled_first import watched_compiles
from support.exact_data import COMPLEX, FLOATS, exact_data, random_data, same
from support.meshes import (
    MeshCase,
    all_placements,
    hierarchical_sum,
    one_device_sum,
    per_replica,
    refused,
    unchanged,
)

import gradreduce as gr
from gradreduce.device import as_dtype
from gradreduce.reduce.algorithm import as_reduction_groups, reduction_groups_of

hierarchical_copy = partial(reduce_jobs, "hierarchical_copy")

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SIZES = (1, 67, 33_001)  # as in test_hierarchical_copy.py: a tail, and more than one slice


def splits_of(num_replicas: int) -> list[tuple[list[int], ...]]:
    """One group, forwards and backwards; every second replica; three groups; random groups."""
    places = list(range(num_replicas))
    made = [(places[:], []), ([], places[::-1]), (places[1::2], places[::2])]
    made += [(places[::-1],), (places[2::3], places[::3], places[1::3])]
    made.append(tuple([place] for place in places[::-1]))
    for seed in range(3):
        rng = random.Random(10 * num_replicas + seed)
        rng.shuffle(places)
        split = rng.randint(0, num_replicas)
        made.append((places[:split], places[split:]))
    return made


def check_outs(outs, wanted, what=None):
    for replica, out in enumerate(outs):
        assert same(out.numpy(), wanted), (replica, what)


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in-place"])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, as_dtype("int16")], ids=str)
def test_values_on_every_mesh(mesh, make_jobs, random_replicas, dtype, in_place):
    packs = [random_replicas(len(mesh), size, dtype) for size in SIZES]
    divisor = 1 if dtype.kind == "i" else len(mesh)
    for groups in splits_of(len(mesh)):
        jobs = make_jobs(mesh, packs, divisor, in_place=in_place)
        hierarchical_copy(jobs, as_reduction_groups(groups))
        for job, replicas in zip(jobs, packs, strict=True):
            check_outs(
                job.outs, hierarchical_sum(replicas, divisor, reduction_groups=groups), groups
            )


SPELLED_OUT = {
    ((0, 2), (1, 3)): lambda r: (r[0] + r[2]) + (r[1] + r[3]),
    ((2, 0), (3, 1)): lambda r: (r[2] + r[0]) + (r[3] + r[1]),
    ((3,), (1, 0, 2)): lambda r: r[3] + ((r[1] + r[0]) + r[2]),
    ((3, 0), (4, 2, 1)): lambda r: (r[3] + r[0]) + ((r[4] + r[2]) + r[1]),
    ((4, 3, 1, 0), (2,)): lambda r: (((r[4] + r[3]) + r[1]) + r[0]) + r[2],
    ((), (1, 0, 2)): lambda r: (r[1] + r[0]) + r[2],
    ((2, 0, 1, 3), ()): lambda r: ((r[2] + r[0]) + r[1]) + r[3],
    ((0, 3, 5, 6), (1, 2, 4, 7)): lambda r: (
        (((r[0] + r[3]) + r[5]) + r[6]) + (((r[1] + r[2]) + r[4]) + r[7])
    ),
}


@pytest.mark.parametrize("groups", SPELLED_OUT, ids=str)
@pytest.mark.parametrize("peer_access", [True, False], ids=["peers", "copies"])
@pytest.mark.parametrize("spread", [True, False], ids=["apart", "together"])
def test_the_order_of_additions_spelled_out(groups, peer_access, spread):
    num_replicas = sum(map(len, groups))
    rng = np.random.default_rng(num_replicas)
    replicas = [
        (rng.standard_normal(500) * 2.0 ** rng.integers(-8, 9, 500)).astype(np.float32)
        for _ in range(num_replicas)
    ]
    wanted = SPELLED_OUT[groups](replicas)
    assert not same(wanted, hierarchical_sum(replicas))  # the data can tell
    placement = tuple(range(num_replicas)) if spread else (0,) * num_replicas
    with MeshCase(placement, peer_access).open() as mesh:
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, reduction_groups=groups)
        value = per_replica(mesh, replicas.__getitem__)
        check_outs(ops.reduce(SUM, value, value).buffers, wanted)


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(((2, 0), (1, 3)), id="4"),
        pytest.param(((3, 0), (4, 2, 1)), id="5", marks=pytest.mark.exhaustive),
    ],
)
def test_every_placement_gives_the_same_bits(make_jobs, groups):
    num_replicas = sum(map(len, groups))
    packs = [
        [random_data((size,), dtype, seed=seed) for seed in range(num_replicas)]
        for dtype, size in (("float32", 5), ("float32", 16_390), ("bfloat16", 32_771))
    ]
    expected = [hierarchical_sum(pack, num_replicas, reduction_groups=groups) for pack in packs]
    for placement in all_placements(num_replicas, 3):
        for peer_access in (True, False):
            with MeshCase(placement, peer_access).open() as mesh:
                jobs = make_jobs(mesh, packs, num_replicas)
                hierarchical_copy(jobs, groups)
                for job, wanted in zip(jobs, expected, strict=True):
                    check_outs(job.outs, wanted, placement)


@pytest.mark.parametrize(
    "options",
    [
        {"num_packs": 0},
        {"num_packs": 1},
        {"num_packs": 3},
        {"num_packs": 0, "agg_small_grads_max_bytes": 99, "agg_small_grads_max_group": 2},
    ],
    ids=str,
)
def test_no_packing_changes_the_bits(numpy_mesh, options):
    shapes = [(3, 5), (), (0,), (20_011,), (7,), (8, 2)]
    grads = [
        [random_data(shape, "float32", seed=100 * replica + turn)
         for turn, shape in enumerate(shapes)]
        for replica in range(len(numpy_mesh))
    ]  # fmt: skip
    for groups in splits_of(len(numpy_mesh)):
        ops = gr.AllReduceCrossDeviceOps(
            "hierarchical_copy", mesh=numpy_mesh, reduction_groups=groups, **options
        )
        with unchanged(*(array for of_one in grads for array in of_one)):
            reduced = ops.all_reduce(grads)
        for turn, column in enumerate(zip(*grads, strict=True)):
            wanted = hierarchical_sum(column, len(numpy_mesh), reduction_groups=groups)
            assert all(same(row[turn], wanted) for row in reduced)


def test_two_halves_are_the_default(mesh, make_jobs, random_replicas):
    packs = [random_replicas(len(mesh), 67, "float32")]
    places = list(range(len(mesh)))
    groups = as_reduction_groups([places[: len(mesh) // 2], places[len(mesh) // 2 :]])
    assert groups == reduction_groups_of(len(mesh))
    jobs, others = (make_jobs(mesh, packs) for _ in range(2))
    with mesh.journal() as journal:
        hierarchical_copy(jobs)
    with mesh.journal() as other:
        hierarchical_copy(others, groups)
    assert journal.records == other.records
    check_outs(others[0].outs, jobs[0].outs[0].numpy())


# Without peer access, one small pack, main device 0: every copy, in order, and every launch.
STAGED = {
    ((0, 1, 2, 3), ((0, 2), (1, 3))): (
        [(2, 0), (3, 1), (1, 0), (0, 1), (0, 2), (0, 3)],
        ["add_n@0", "add_n@1", "all_sum@0"],
    ),
    # Islands that do not follow the order of the replicas: one partial sum is copied, not inputs.
    ((0, 1, 0, 1), ((0, 2), (1, 3))): (
        [(1, 0), (0, 1), (1, 3)],
        ["add_n@0", "add_n@1", "all_sum@0"],
    ),
    # Replica 0 is the last of its group, replica 3 the last of the other.
    ((0, 1, 2, 3, 4), ((1, 0), (4, 3, 2))): (
        [(1, 0), (4, 3), (2, 3), (3, 0), (0, 1), (0, 2), (0, 3), (0, 4)],
        ["add_n@0", "add_n@3", "all_sum@0"],
    ),
    ((0, 1, 2), ((), (2, 1, 0))): (
        [(2, 0), (1, 0), (0, 1), (0, 2)],
        ["add_n@0", "all_sum@0"],
    ),
}


@pytest.mark.parametrize("case", STAGED, ids=str)
def test_without_peers_the_reduction_groups_are_added_separately(make_jobs, case):
    placement, groups = case
    with MeshCase(placement, peer_access=False).open() as mesh:
        jobs = make_jobs(mesh, [[np.ones(100, np.float32)] * len(mesh)])
        with mesh.journal() as journal:
            hierarchical_copy(jobs, groups)
    copies, launches = STAGED[case]
    assert [(record.source, record.device) for record in journal.of("copy")] == copies
    assert [f"{record.name}@{record.device}" for record in journal.of("launch")] == launches


def test_all_that_is_launched_was_compiled_first(numpy_mesh):
    with watched_compiles(numpy_mesh) as watch:
        for groups in [None, *splits_of(len(numpy_mesh))]:
            for dtype in ("float32", "bfloat16"):
                ops = gr.HierarchicalCopyAllReduce(2, reduction_groups=groups)
                value = per_replica(numpy_mesh, lambda _, to=dtype: np.ones(9000, as_dtype(to)))
                watch.start()
                ops.reduce(MEAN, value, value)
                assert watch.late == []


@pytest.mark.parametrize("groups", [([0], [1, 2]), ([2, 0], [1])], ids=str)
def test_what_was_prepared_for_other_reduction_groups_is_not_taken_for_these(groups):
    half = as_dtype("float16")
    with MeshCase((0, 1, 2), peer_access=False).open() as mesh, watched_compiles(mesh):
        for reduction_groups in (None, groups, ([], [0, 1, 2])):
            ops = gr.HierarchicalCopyAllReduce(reduction_groups=reduction_groups)
            ops._rehearse_sums(mesh.devices, half, half)
        assert len(mesh.mesh_state.compiled_keys) == 3


@pytest.mark.parametrize(
    ("reduction_groups", "says"),
    [
        (5, "reduction_groups=5 must be a list of lists of replica numbers"),
        ("01", "reduction_groups='01' must be a list of lists"),
        ([], "names no replica"),
        ([0, 1], "0 must be a list of replica numbers"),
        ({0: [0], 1: [1]}, "must be a list of lists"),
        ([[0], "1"], "'1' must be a list of replica numbers"),
        ([[0], None], "None must be a list of replica numbers"),
        ([[0], {1}], "{1} must be a list of replica numbers"),
        ([[0], [1.0]], "1.0 must be a non-negative integer"),
        ([[0], [True]], "True must be a non-negative integer"),
        ([[0], [np.True_]], "must be a non-negative integer"),
        ([[0], [-1]], "-1 must be a non-negative integer"),
        ([[0], ["1"]], "'1' must be a non-negative integer"),
        ([[0], [[1]]], "[1] must be a non-negative integer"),
        ([[], []], "names no replica"),
        ([[0, 1], [1, 2]], "names replica 1 twice"),
        ([[0, 0, 0], [1]], "names replica 0 twice"),
        ([[0, 1, 2], [2, 1, 3]], "names replicas 1, 2 twice"),
        ([[0, 1], [3]], "leaves out replica 2"),
        ([[], [4, 1]], "leaves out replicas 0, 2, 3"),
    ],
    ids=str,
)
def test_invalid_reduction_groups_are_refused_at_construction(reduction_groups, says):
    for make in (
        lambda: gr.HierarchicalCopyAllReduce(reduction_groups=reduction_groups),
        lambda: gr.AllReduceCrossDeviceOps("hierarchical_copy", reduction_groups=reduction_groups),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            make()


def test_a_huge_replica_number_makes_no_huge_list():
    with pytest.raises(ValueError, match="names replica 1000000000000 and leaves out most"):
        gr.HierarchicalCopyAllReduce(reduction_groups=([0], [10**12]))


@pytest.mark.parametrize("reduction_groups", [([0], [1]), "wrong"])
def test_nccl_takes_no_reduction_groups(reduction_groups):
    for make in (
        lambda: gr.AllReduceCrossDeviceOps(reduction_groups=reduction_groups),
        lambda: gr.AllReduceCrossDeviceOps("nccl", reduction_groups=reduction_groups),
    ):
        with pytest.raises(
            ValueError, match=r"reduction_groups=.* is only for 'hierarchical_copy'; 'nccl'"
        ):
            make()
    with pytest.raises(TypeError, match="reduction_groups"):
        gr.NcclAllReduce(reduction_groups=reduction_groups)


def test_reduction_groups_are_kept_as_they_were():
    groups = [[0, 2], range(1, 2)]
    ops = gr.HierarchicalCopyAllReduce(reduction_groups=groups)
    groups[0].append(1)
    assert ops.reduction_groups == ((0, 2), (1,))
    assert gr.HierarchicalCopyAllReduce(reduction_groups=([np.int64(1)], [0])).reduction_groups == (
        (1,),
        (0,),
    )
    assert gr.HierarchicalCopyAllReduce().reduction_groups is None


@pytest.mark.parametrize(
    ("reduction_groups", "says"),
    [
        (([0], [1]), r"leaves out replica 2 of 3 replicas"),
        (([0], []), r"leaves out replicas 1, 2 of 3 replicas"),
        (([0, 3], [2, 1]), r"names replica 3 of 3 replicas"),
        (([], range(5)), r"names replicas 3, 4 of 3 replicas"),
    ],
    ids=str,
)
def test_groups_of_other_replicas_are_refused_at_the_call(reduction_groups, says):
    ops = gr.HierarchicalCopyAllReduce(reduction_groups=reduction_groups)
    with MeshCase((0, 0, 1)).open() as mesh:
        arrays = [np.full(4, replica, np.float32) for replica in range(3)]
        value = per_replica(mesh, arrays.__getitem__, lambda device, array: device.upload(array))
        ops.mesh = mesh
        with unchanged(*arrays):
            for call in (
                lambda: ops.reduce(SUM, value, value),
                lambda: ops.batch_reduce(MEAN, [(value, mesh)] * 2),
                lambda: ops.plan(MEAN, [(value, mesh)]),
                lambda: ops.all_reduce([[array] for array in arrays]),
                lambda: ops.reduce_buffers([value.buffers], consume=ExitStack()),
                lambda: gr.ConditionalAccumulator("float32", device=mesh, cross_device_ops=ops),
            ):
                with refused(mesh, ValueError, says):
                    call()
            assert all(same(b.numpy(), a) for b, a in zip(value.buffers, arrays, strict=True))
        with pytest.raises(ValueError, match=says):
            gr.SyncStep([gr.Variable(arrays[0], device=mesh)], gr.MomentumOptimizer(1, 0), ops)


def test_one_value_of_other_devices_stops_the_batch():
    with MeshCase((0, 0, 1)).open() as mesh:
        ops = gr.HierarchicalCopyAllReduce(reduction_groups=([2], [0, 1]))
        good = gr.PerReplica([device.zeros((4,), "float32") for device in mesh], mesh)
        short = gr.PerReplica(good.buffers[:2], devices=mesh.devices[:2])
        for batch in ([good, short], [short, good]):
            with refused(mesh, ValueError, "names replica 2 of 2 replicas"):
                ops.batch_reduce(SUM, [(value, value) for value in batch])


def test_what_is_added_on_one_device_has_no_reduction_groups():
    with MeshCase((0, 0, 1)).open() as mesh:
        ops = gr.HierarchicalCopyAllReduce(reduction_groups=([2], [1, 0]))
        arrays = [random_data((50,), "float32", seed=seed) for seed in range(3)]
        for count in (3, 2):
            value = gr.PerReplica(arrays[:count], devices=mesh.devices[:count])
            check_outs(ops.reduce(SUM, value, "sim:1").buffers, one_device_sum(arrays[:count]))


def test_replicas_are_numbered_as_the_devices_of_the_value():
    """Replica 0 is on the first of the value's devices, not on the first of the mesh."""
    with MeshCase((0, 1, 2, 3)).open() as mesh:
        devices = [mesh.devices[place] for place in (3, 1, 0)]
        arrays = [random_data((50,), "float32", seed=seed) for seed in range(3)]
        value = gr.PerReplica(arrays, mesh, devices=devices)
        ops = gr.HierarchicalCopyAllReduce(reduction_groups=([2, 0], [1]))
        wanted = hierarchical_sum(arrays, reduction_groups=([2, 0], [1]))
        check_outs(ops.reduce(SUM, value, value).buffers, wanted)


@pytest.mark.parametrize("peer_access", [True, False])
def test_a_training_step_takes_its_reduction_groups(peer_access):
    groups = ([3, 0], [2, 4, 1])
    grads = [exact_data((40,), "float32", seed=seed) / 3 for seed in range(5)]
    with MeshCase((0, 1, 1, 2, 0), peer_access).open() as mesh:
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, reduction_groups=groups)
        variable = gr.Variable(np.zeros(40, np.float32), device=mesh)
        step = gr.SyncStep([variable], gr.GradientDescentOptimizer(1), ops)
        assert step([[[grad]] for grad in grads])
        wanted = np.float32(0) - hierarchical_sum(grads, 5, reduction_groups=groups)
        check_outs(variable.buffers, wanted)
