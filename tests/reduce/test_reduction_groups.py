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
from support.exact_data import random_data, same
from support.meshes import (
    MeshCase,
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
