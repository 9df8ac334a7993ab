"""``profile``: bytes and lower bounds computed by hand, and its journal; no side effects."""

import pytest
from support.meshes import MeshCase

import gradreduce as gr
from gradreduce.backends import CUDA
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.reduce import profile as explain
from gradreduce.reduce.profile import OperationCounts, copy_bandwidth

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
MEMORY, LINK = 1000.0, 10.0  # bytes per second


@pytest.fixture
def bandwidths(monkeypatch):
    """Bandwidths of a slow machine instead of this one."""

    def told(device, source):
        return MEMORY / 2 if device is source else LINK

    monkeypatch.setattr(explain, "copy_bandwidth", told)


def hierarchical(mesh, num_packs, algorithm="hierarchical_copy"):
    return gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)


def pairs_of(mesh, *sizes):
    values = [
        gr.PerReplica.of([device.zeros((size,), "float32") for device in mesh]) for size in sizes
    ]
    return [(value, value) for value in values]


def stages_of(told):
    return {stage.name: stage for stage in told.stages}


def test_a_sum_of_peers_by_hand(bandwidths):
    with MeshCase((0, 1, 2)).open() as mesh:
        told = hierarchical(mesh, 0).profile(SUM, pairs_of(mesh, 8))
    added = stages_of(told)["all-reduce"]
    assert added.planned == added.done == OperationCounts(launches=1, bytes=4 * 32)
    assert added.traffic.read == added.traffic.written == {0: 32, 1: 32, 2: 32}
    assert added.traffic.links == {(1, 0): 32, (0, 1): 32, (2, 0): 32, (0, 2): 32}
    assert added.floor_seconds == told.floor_seconds == 6 * 32 / MEMORY  # one memory for all
    for name in ("pack", "unpack", "copies"):
        assert stages_of(told)[name].planned == stages_of(told)[name].done == OperationCounts()
    assert told.memory_bandwidth == dict.fromkeys(range(3), MEMORY)
    assert 0 < told.host_seconds <= told.seconds
    text = str(told)
    assert "link 2 to 0: 0.000 MB, at 0.00 GB/s 3200.0000 ms" in text
    assert "times the floor of 192.0000 ms" in text
    assert text.endswith("the journal counted what was planned")


def test_a_pack_by_hand_and_its_views(bandwidths):
    with MeshCase((0, 0)).open() as mesh:
        packed = stages_of(hierarchical(mesh, 1).profile(SUM, pairs_of(mesh, 3, 5)))
        flat = mesh.flat_buffer([(3,), (5,)], "float32")
        views = [gr.PerReplica.of(column) for column in zip(*flat.views, strict=True)]
        ready = stages_of(hierarchical(mesh, 1).profile(SUM, [(each, each) for each in views]))
    assert packed["pack"].planned == OperationCounts(launches=1)
    assert packed["pack"].traffic.read == {0: 2 * (12 + 20)}
    assert packed["pack"].traffic.written == {0: 2 * (16 + 32)}  # gaps too
    assert packed["all-reduce"].traffic.memory == {0: 2 * 2 * 48}
    assert ready["pack"].planned == ready["unpack"].planned == OperationCounts()
    assert ready["all-reduce"].traffic == packed["all-reduce"].traffic


@pytest.mark.parametrize("peer_access", [True, False])
def test_a_wire_of_its_own_is_unpacked(bandwidths, peer_access):
    with MeshCase((0, 1), peer_access).open() as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh, wire_dtype="float16")
        told = stages_of(ops.profile(MEAN, pairs_of(mesh, 16, 16)))
    for name, read, written in (("pack", 4, 2), ("unpack", 2, 4)):
        assert told[name].traffic.read == {0: 32 * read, 1: 32 * read}
        assert told[name].traffic.written == {0: 32 * written, 1: 32 * written}
        assert told[name].planned == told[name].done


def test_gpus_and_links_work_in_parallel(bandwidths):
    """For GPUs the slowest is the lower bound, for a collective the links of a ring."""
    mesh = DryRunMesh((0, 0, 1, 2), CUDA, True, (0, (4,))).mesh
    told = hierarchical(mesh, 1, "nccl").profile(SUM, pairs_of(mesh, 600))
    added = stages_of(told)["all-reduce"]
    sent = 2 * 2 * 2400 // 3
    assert added.traffic.links == {(0, 1): sent, (1, 2): sent, (2, 0): sent}
    assert added.floor_seconds == sent / LINK
    told = hierarchical(mesh, 1).profile(SUM, pairs_of(mesh, 300, 300))
    packed = stages_of(told)["pack"]
    assert packed.floor_seconds == 4 * 2400 / MEMORY  # two replicas of GPU 0, read and written
    assert told.floor_seconds == 2400 / LINK  # one replica each way, over every link


def test_copies_cross_links(bandwidths):
    mesh = DryRunMesh((0, 1), CUDA, False, (0, (2,))).mesh
    copied = stages_of(hierarchical(mesh, 0).profile(SUM, pairs_of(mesh, 6)))["copies"]
    assert copied.planned == copied.done == OperationCounts(copies=2, bytes=48)
    assert copied.traffic.links == {(1, 0): 24, (0, 1): 24}
    assert copied.traffic.read == copied.traffic.written == {0: 24, 1: 24}


def test_differences_from_the_plan_are_reported(bandwidths, monkeypatch):
    with MeshCase((0, 0)).open() as mesh:
        ops = hierarchical(mesh, 0)
        once = ops.reduce_batch

        def twice(*arguments, **options):
            once(*arguments, **options)
            return once(*arguments, **options)

        monkeypatch.setattr(ops, "reduce_batch", twice)
        told = ops.profile(SUM, pairs_of(mesh, 4))
    assert stages_of(told)["all-reduce"].done.launches == 2
    (line,) = told.differences
    assert line.startswith("only done: 1 x Record(kind='launch', name='all_sum'")
    assert "1, not 2" in str(told)
    assert "the journal differs from the plan:\n    only done" in str(told)


def test_bandwidths_are_measured_once_for_a_mesh(monkeypatch):
    monkeypatch.setattr("gradreduce.reduce.profile.HOST_BYTES", 1 << 10)
    with MeshCase((0, 1)).open() as mesh:
        first, second = mesh.devices
        with mesh.journal() as journal:
            rate = copy_bandwidth(first, first)
        assert rate > 0
        assert {(each.device, each.source, each.nbytes) for each in journal.of("copy")} == {
            (0, 0, 1 << 10)
        }
        with mesh.journal() as journal:
            assert copy_bandwidth(second, second) == rate  # the same host's memory
            assert copy_bandwidth(first, second) == rate
        assert journal.records == []


def test_each_link_of_gpus_is_measured(monkeypatch):
    monkeypatch.setattr("gradreduce.reduce.profile.GPU_BYTES", 64)
    mesh = DryRunMesh((0, 1, 1), CUDA, True, (0, (3,))).mesh
    first, second, third = mesh
    with mesh.journal() as journal:
        assert copy_bandwidth(second, first) > 0
        copy_bandwidth(third, first)  # the same link
        copy_bandwidth(first, second)
        copy_bandwidth(second, second)
        copy_bandwidth(third, third)
    ways = [(each.device, each.source) for each in journal.of("copy")]
    assert list(dict.fromkeys(ways)) == [(1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param([0, 0], marks=pytest.mark.gpu),
        pytest.param([0, 1, 1, 2, 0], marks=pytest.mark.multi_gpu(3)),
    ],
    ids=str,
)
def test_a_reduction_on_gpus_is_profiled(monkeypatch, placement):
    monkeypatch.setattr("gradreduce.reduce.profile.GPU_BYTES", 1 << 12)
    with gr.open_mesh(placement, backend="cuda") as mesh:
        told = hierarchical(mesh, 2).profile(MEAN, pairs_of(mesh, 15, 1003, 1, 2800))
        assert told.differences == ()
        assert told.plan.launches == sum(stage.done.launches for stage in told.stages) > 0
        assert told.floor_seconds > 0
        assert set(told.memory_bandwidth) == set(placement)
