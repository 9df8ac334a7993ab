"""Plans: their counts are those of the journal, and making one has no effect."""

import numpy as np
import pytest
from support import meshes
from support.meshes import MeshCase, owned, per_replica, refused

import gradreduce as gr
from gradreduce.backends import CUDA
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


def ops_of(algorithm, mesh, **settings):
    return gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh, **settings)


def dense(mesh, shape, dtype, place=owned):
    kind = gr.device.as_dtype(dtype)
    return per_replica(mesh, lambda replica: np.ones(shape).astype(kind), place)


def counts(told):
    """The same four numbers of a plan and of a journal."""
    collectives = told.collectives if hasattr(told, "packs") else len(told.of("collective"))
    return told.launches, told.copies, collectives, told.bytes


def agreed(mesh, ops, op, pairs, **options):
    """Returns the plan after checking that a run does the same."""
    plan = ops.plan(op, pairs, **options)
    with mesh.journal() as journal:
        ops.batch_reduce(op, pairs, **options)
    assert counts(plan) == counts(journal)
    assert list(plan.sent) == sorted({device.physical for device in mesh})
    if not plan.collectives and not plan.copies:  # a copy may stay on its physical device
        assert sum(plan.sent.values()) == plan.bytes
    return plan


@pytest.mark.parametrize("coalesce", [False, True])
def test_the_journal_agrees_on_whatever_a_batch_may_hold(numpy_mesh, coalesce):
    last = numpy_mesh.devices[-1]
    table = gr.PerReplica(
        [gr.IndexedSlices(np.ones((3, 2), np.float32), [1, 0, 1], (4, 2))] * len(numpy_mesh),
        numpy_mesh,
    )
    value, counted = dense(numpy_mesh, (4, 2), "float32"), dense(numpy_mesh, (9,), "int8")
    both = gr.PerReplica([table.parts[0], *value.buffers[1:]])
    pairs = [(value, value), (table, table), (value, last), (counted, value), (table, "sim:0"),
             (counted, [last]), (value, numpy_mesh), (both, last), (both, both)]  # fmt: skip
    for algorithm in ALGORITHMS:
        for op in (SUM, MEAN):
            ops = ops_of(algorithm, numpy_mesh)
            plan = agreed(numpy_mesh, ops, op, pairs, coalesce=coalesce)
            ways = {pack.tensors: pack.way for pack in plan.packs}
            # With only one device, a reduction to one device is an all-reduce.
            reduced, alone = [(0, 6), (3,)], [1, 2, 4, 5, 7, 8]
            if len(numpy_mesh) == 1:
                reduced, alone = [(0, 2, 6), (3, 5)], [1, 4, 7, 8]
            assert {ways[tensors] for tensors in reduced} == {algorithm}
            assert {ways[place,] for place in alone} == {"one device"}


@pytest.mark.parametrize(
    ("algorithm", "placement", "peers", "crossing"),
    [
        ("hierarchical_copy", (0, 0), True, "none"),
        ("nccl", (0, 0), True, "none"),
        ("hierarchical_copy", (0, 1), True, "direct"),
        ("hierarchical_copy", (0, 1), False, "copies"),
        ("nccl", (0, 1), True, "collective"),
    ],
)
def test_the_plan_tells_who_reads_whose_memory(algorithm, placement, peers, crossing):
    """A user's array on another GPU is packed first if a peer cannot read it."""
    with gr.open_mesh(placement, backend="sim", peer_access=peers) as mesh:
        ours = dense(mesh, (4,), "float32")
        theirs, unmapped = (
            gr.PerReplica([np.zeros(4, np.float32) for _ in mesh], mesh) for _ in range(2)
        )
        for buffer in unmapped.buffers:
            buffer.block.peer_mapped = False
        ops = gr.AllReduceCrossDeviceOps(algorithm, 0, mesh=mesh, wire_dtype="float32")
        plan = ops.plan(SUM, [(each, each) for each in (ours, theirs, unmapped)])
        assert [pack.crossing for pack in plan.packs] == [crossing] * 3
        assert [pack.moved for pack in plan.packs] == [0, 0, 2 * (crossing == "direct")]
        half = gr.AllReduceCrossDeviceOps(algorithm, 0, mesh=mesh, wire_dtype="float16")
        (pack,) = half.plan(SUM, [(ours, ours)]).packs
        assert (pack.moved, pack.nbytes, pack.wire) == (2, 8, np.dtype("float16"))
        assert "as float16, packed on 2 devices" in str(half.plan(SUM, [(ours, ours)]))


def test_the_plan_tells_what_one_device_reads():
    with gr.open_mesh((0, 1, 1), backend="sim") as mesh:
        ours = dense(mesh, (4,), "float32")
        theirs = gr.PerReplica([np.zeros(4, np.float32) for _ in mesh], mesh)
        tables = [gr.IndexedSlices(np.zeros((1, 3), np.float32), [1], (4, 3)) for _ in mesh]
        rows = gr.PerReplica(tables, mesh)
        mixed = gr.PerReplica([*tables[:2], mesh.devices[2].zeros((4, 3), "float32")], mesh)
        near = gr.PerReplica(ours.buffers[1:])
        pairs = [(ours, "sim:0"), (theirs, "sim:0"), (rows, mesh), (mixed, "sim:0"),
                 (near, "sim:1"), (near, ["sim:1", "sim:0"])]  # fmt: skip
        for peers, crossing in ((True, "direct"), (False, "copies"), ({(1, 0)}, "copies")):
            mesh.mesh_state.peer_access = peers
            plan = agreed(mesh, ops_of("nccl", mesh), SUM, pairs)
            assert [pack.crossing for pack in plan.packs] == [crossing] * 4 + ["none", "result"]
            assert "replicas, only the result is copied: tensors 5" in str(plan)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_planning_does_nothing_and_equal_calls_have_equal_plans(algorithm):
    with MeshCase((0, 1, 1)).open() as mesh:
        ops = ops_of(algorithm, mesh)
        first, second = (dense(mesh, (3, 2), "float32") for _ in range(2))
        before = [buffer.numpy() for buffer in first.buffers]
        grown = meshes.num_grown(mesh)
        with mesh.journal() as journal:
            plan = ops.plan(MEAN, [(first, first)])
            assert ops.plan(MEAN, [(second, mesh)]) == plan
            assert ops_of(algorithm, None).plan(MEAN, [(second, mesh)]) == plan
            assert ops.plan(MEAN, [(first, first), (second, second)]) != plan
            assert ops_of(algorithm, mesh, num_packs=2).plan(MEAN, [(first, first)]) != plan
            assert ops.plan(MEAN, [(first, "sim:1")]) != plan
        assert journal.records == []
        assert meshes.num_grown(mesh) == grown
        assert all(map(np.array_equal, before, [buffer.numpy() for buffer in first.buffers]))


def test_the_journal_agrees_on_weights(numpy_mesh):
    weights = [2.5, 0, 1, 3, 0.5, 7, 9, 11, 1][: len(numpy_mesh)]
    table = gr.PerReplica(
        [gr.IndexedSlices(np.ones((3, 2), np.float32), [1, 0, 1], (4, 2))] * len(numpy_mesh),
        numpy_mesh,
    )
    value, half = dense(numpy_mesh, (4, 2), "float32"), dense(numpy_mesh, (9,), "float16")
    pairs = [(value, value), (half, half), (table, table), (value, "sim:0"), (half, numpy_mesh)]
    for algorithm in ALGORITHMS:
        for op in (SUM, MEAN):
            ops = ops_of(algorithm, numpy_mesh)
            plan = agreed(numpy_mesh, ops, op, pairs, weights=weights)
            assert plan.weights == tuple(weights)
            assert str(plan).splitlines()[1].startswith("  weights of the replicas: 2.5")
            profile = ops.profile(op, pairs, weights=weights)
            assert profile.plan == plan
            assert profile.differences == ()
            assert agreed(numpy_mesh, ops, op, pairs, weights=[1] * len(weights)).weights == ()


def test_a_plan_asks_no_other_process_for_weights():
    mesh = DryRunMesh((0, 1), CUDA, True, (0, (2, 2))).mesh
    value, ops = dense(mesh, (3,), "float32"), ops_of("hierarchical_copy", mesh)
    assert ops.plan(MEAN, [(value, value)], weights=[0, 0]).weights == (0, 0)
    assert ops.plan(MEAN, [(value, value)], weights=[1, 1]).weights == ()
    with MeshCase((0, 1)).open() as mesh:
        value = dense(mesh, (3,), "int32")
        for op, weights, text in (
            (SUM, [0, 0], "the sum of all weights is 0"),
            (SUM, [1], "weights has 1 entries; expected 2"),
            (MEAN, [1, 2], "a mean of integers takes no weights"),
        ):
            for call in (ops_of("nccl", mesh).plan, ops_of("nccl", mesh).profile):
                with refused(mesh, ValueError, text):
                    call(op, [(value, value)], weights=weights)


def test_it_is_printed_for_people():
    with MeshCase((0, 0, 1, 1)).open() as mesh:
        ops = ops_of("hierarchical_copy", mesh)
        values = [dense(mesh, (10,), "float32") for _ in range(5)]
        pairs = [*((value, value) for value in values), (values[0], "sim:2")]
        text = str(ops.plan(SUM, pairs)).splitlines()
        assert str(ops.plan(SUM, pairs[:1])).startswith("1 pack on sim [0, 0, 1, 1]: ")
    assert text[0] == (
        "2 packs on sim [0, 0, 1, 1]: 4 launches, 0 copies, 0 collective ranks, "
        "at most 560 bytes sent by a device, 1,040 by all (in a ring 280 by each)"
    )
    assert text[1].split() == "0 hierarchical_copy float32 240 bytes of each of 4 replicas, " \
        "packed on 4 devices, read and written by their peers: tensors 0-4".split()  # fmt: skip
    assert text[2].split() == "1 one device float32 40 bytes of each of 4 replicas, " \
        "read by the device that adds them: tensors 5".split()  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "size", "parts"),
    [
        ("nccl", 1000, (6, 6, 6, 6)),
        ("hierarchical_copy", 80000, (6, 6, 6, 6)),
        ("hierarchical_copy", 1000, (12, 4, 4, 4)),  # the first device adds a small pack alone
    ],
)
def test_the_bytes_of_each_device_are_beside_those_of_a_ring(algorithm, size, parts):
    with MeshCase((0, 1, 2, 3)).open() as mesh:
        value = dense(mesh, (size,), "float32")
        plan = ops_of(algorithm, mesh).plan(SUM, [(value, value)])
    assert plan.ring_bytes == 6 * size  # 2 (n - 1) / n of 4 bytes
    assert plan.sent == {device: part * size for device, part in enumerate(parts)}
    assert f"{4 * plan.ring_bytes:,} by all (in a ring {6 * size:,} by each)" in str(plan)


def test_an_empty_value_has_nothing_to_transfer():
    with MeshCase((0, 1)).open() as mesh:
        far, near = dense(mesh, (0, 4), "float32"), mesh.devices[0].zeros((0,), "int8")
        pairs = [(far, "sim:0"), (gr.PerReplica([near]), "sim:1")]
        plan = agreed(mesh, ops_of("hierarchical_copy", mesh), SUM, pairs)
    _, far_text, near_text = str(plan).splitlines()
    assert "0 bytes of each of 2 replicas, nothing to transfer: tensors 0" in far_text
    assert "0 bytes of 1 replica, on one physical device: tensors 1" in near_text


@pytest.mark.parametrize("form", ["plan", "profile", "prepare", "capture"])
def test_bad_arguments_are_those_of_the_reduction(form):
    with MeshCase((0, 1)).open() as mesh, MeshCase((0,)).open() as other:
        ops = ops_of("hierarchical_copy", mesh)
        call = getattr(ops, form)
        value, alone = dense(mesh, (3,), "float32"), dense(other, (3,), "float32")
        for pairs, text in (
            ([], "there is no tensor to reduce"),
            ([(value, value), (alone, alone)], "these are on 2"),
            ([(value, "sim:7")], "destination 0: 'sim:7' is not a device"),
            ([value], "must be a tuple of size 2"),
        ):
            with refused(mesh, ValueError, text):
                call(SUM, pairs)
        with refused(mesh, ValueError, "reduce_op="):
            call("sum", [(value, value)])
