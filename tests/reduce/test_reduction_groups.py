"""``reduction_groups=``: which replicas hierarchical_copy adds first, and in which order."""

import re
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from support.compiled_first import watched_compiles
from support.exact_data import random_data, same
from support.meshes import (
    MeshCase,
    check_mirrored,
    hierarchical_sum,
    one_device_sum,
    per_replica,
    refused,
    unchanged,
)

import gradreduce as gr
from gradreduce.device import as_dtype

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN

# A number of replicas, or reduction groups -> the sum. test_values.py draws others.
SPELLED_OUT = {
    3: lambda r: r[0] + (r[1] + r[2]),
    5: lambda r: (r[0] + r[1]) + ((r[2] + r[3]) + r[4]),
    ((3, 0), (4, 2, 1)): lambda r: (r[3] + r[0]) + ((r[4] + r[2]) + r[1]),
    ((), (2, 0, 1)): lambda r: (r[2] + r[0]) + r[1],
    ((1,), (), (3, 2), (0,)): lambda r: (r[1] + (r[3] + r[2])) + r[0],
}


@pytest.mark.parametrize("groups", SPELLED_OUT, ids=str)
@pytest.mark.parametrize("peer_access", [True, False], ids=["peers", "copies"])
@pytest.mark.parametrize("spread", [True, False], ids=["apart", "together"])
def test_the_order_of_additions_spelled_out(groups, peer_access, spread):
    options = {} if isinstance(groups, int) else {"reduction_groups": groups}
    count = sum(map(len, groups)) if options else groups
    rng = np.random.default_rng(count)
    scales = 2.0 ** rng.integers(-8, 9, (count, 500))
    replicas = list((rng.standard_normal((count, 500)) * scales).astype(np.float32))
    wanted = SPELLED_OUT[groups](replicas)
    assert (wanted != sum(replicas[1:], replicas[0])).any()  # the data can tell
    with MeshCase(tuple(range(count)) if spread else (0,) * count, peer_access).open() as mesh:
        value = per_replica(mesh, replicas.__getitem__)
        ops = gr.HierarchicalCopyAllReduce(**options)
        check_mirrored(ops.reduce(SUM, value, value), wanted)


def test_groups_of_one_mesh_compile_first(numpy_mesh):
    """Each call launches other kernels: one group, each replica alone, or two halves."""
    places = range(len(numpy_mesh))
    with watched_compiles(numpy_mesh) as watch:
        for groups in (None, [places], [[place] for place in places[::-1]]):
            for dtype in ("float32", "bfloat16"):
                ops = gr.HierarchicalCopyAllReduce(2, reduction_groups=groups)
                value = per_replica(numpy_mesh, lambda _, to=dtype: np.ones(9000, as_dtype(to)))
                watch.start()
                ops.reduce(MEAN, value, value)
                assert watch.late == []


WRONG_GROUPS = [
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
    ([[0], [10**12]], "names replica 1000000000000 and leaves out most"),  # makes no huge list
]


def test_invalid_reduction_groups_are_refused_at_construction():
    for groups, says in WRONG_GROUPS:
        for make in (
            gr.HierarchicalCopyAllReduce,
            partial(gr.AllReduceCrossDeviceOps, "hierarchical_copy"),
        ):
            with pytest.raises(ValueError, match=re.escape(says)):
                make(reduction_groups=groups)


def test_nccl_takes_no_reduction_groups():
    text = r"reduction_groups=.* is only for 'hierarchical_copy'; 'nccl'"
    for names in ((), ("nccl",)):
        for groups in (([0], [1]), "wrong"):
            with pytest.raises(ValueError, match=text):
                gr.AllReduceCrossDeviceOps(*names, reduction_groups=groups)
    with pytest.raises(TypeError, match="reduction_groups"):
        gr.NcclAllReduce(reduction_groups=([0], [1]))


def test_reduction_groups_are_kept_as_they_were():
    groups = [[0, 2], range(1, 2), [np.int64(3)]]
    ops = gr.HierarchicalCopyAllReduce(reduction_groups=groups)
    groups[0].append(1)
    assert ops.reduction_groups == ((0, 2), (1,), (3,))
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
        calls = [
            lambda: ops.reduce(SUM, value, value),
            lambda: ops.batch_reduce(MEAN, [(value, mesh)] * 2),
            lambda: ops.plan(MEAN, [(value, mesh)]),
            lambda: ops.all_reduce([[array] for array in arrays]),
            lambda: ops.reduce_buffers([value.buffers], consume=ExitStack()),
            lambda: gr.ConditionalAccumulator("float32", device=mesh, cross_device_ops=ops),
        ]
        if reduction_groups == ([0], [1]):  # one value stops the batch
            two = gr.PerReplica(value.buffers[:2])
            calls.append(lambda: ops.batch_reduce(SUM, [(two, two), (value, value)]))
        with unchanged(*arrays):
            for call in calls:
                with refused(mesh, ValueError, says):
                    call()
            assert all(same(b.numpy(), a) for b, a in zip(value.buffers, arrays, strict=True))
        with pytest.raises(ValueError, match=says):
            gr.SyncStep([gr.Variable(arrays[0], device=mesh)], gr.MomentumOptimizer(1, 0), ops)


def test_replicas_are_numbered_as_the_devices_of_the_value():
    """Replica 0 is on the first of the value's devices; a sum on one device has no groups."""
    groups = ([2, 0], [1])
    arrays = [random_data((50,), "float32", seed=seed) for seed in range(3)]
    ops = gr.HierarchicalCopyAllReduce(reduction_groups=groups)
    with MeshCase((0, 1, 2, 3)).open() as mesh:
        value = gr.PerReplica(arrays, devices=[mesh.devices[place] for place in (3, 1, 0)])
        wanted = hierarchical_sum(arrays, reduction_groups=groups)
        check_mirrored(ops.reduce(SUM, value, value), wanted)
        for count in (3, 2):
            value = gr.PerReplica(arrays[:count], devices=mesh.devices[:count])
            check_mirrored(ops.reduce(SUM, value, "sim:1"), one_device_sum(arrays[:count]))
