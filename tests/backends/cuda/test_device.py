"""Behavior of CUDA devices only: foreign streams and arrays, pinned memory, missing GPUs."""

import sys

import cupy
import numpy as np
import pytest
from device.contract import FLOAT, SIZE, add, data, uploaded
from fake_cupy import surface
from support.exact_data import exact_data, same
from support.implementations import INLINE_ROWS

import gradreduce as gr
from gradreduce import ops
from gradreduce.backends import open_mesh
from gradreduce.backends.cuda import compile, streams
from gradreduce.device import Mesh
from gradreduce.device.run import table
from gradreduce.errors import BackendUnavailableError, DeviceMismatchError

pytestmark = pytest.mark.fake_cupy


def on_gpu(physical: int, values: np.ndarray):
    with cupy.cuda.Device(physical):
        return cupy.asarray(values)


def test_what_is_on_another_gpu_or_on_the_host_is_not_adopted(mesh):
    with pytest.raises(DeviceMismatchError, match="on GPU 1, but cuda:0 is on GPU 0"):
        mesh.devices[0].put(on_gpu(1, data((4,))))
    with pytest.raises(DeviceMismatchError, match="holds CuPy arrays, not ndarray"):
        mesh.devices[0].adopt(data((4,)))


def test_pinned_memory_is_reused(mesh, here):
    device = mesh.devices[0]
    kept = [uploaded(device, seed) for seed in range(20)]
    device.synchronize()
    assert not device._staging
    assert same(kept[7].numpy(), data((SIZE,), seed=7))


@pytest.mark.parametrize("wait", ["_synchronize", "_abandon"])
def test_an_upload_during_a_wait_keeps_its_pinned_memory(gpus, monkeypatch, wait):
    """An upload of another thread, while this one waits in the driver."""
    here = gpus(0, num_gpus=1)
    with open_mesh(1, backend="cuda") as mesh:
        device, made = mesh.devices[0], []

        def meanwhile() -> None:
            if not made:
                made.append(uploaded(device, 2))

        here.at_sync.append(meanwhile)  # at the begin of the wait, which ends as before
        uploaded(device, 1)
        if wait == "_synchronize":
            device._synchronize(device._endless)
        else:
            is_idle = device._is_idle
            monkeypatch.setattr(device, "_is_idle", lambda: is_idle() and not meanwhile())
            assert device._abandon(0)
        assert len(device._staging) == 1
        assert same(made[0].numpy(), data((SIZE,), seed=2))


def test_trim_returns_deferred_memory_after_its_users(gpus):
    """Also users on another GPU, for which CUDA does not wait before it frees."""
    here = gpus(0, num_gpus=2)
    with open_mesh([0, 1], backend="cuda") as mesh:
        near, far = mesh.devices
        source, read = uploaded(near, 1), far.empty((SIZE,), FLOAT)
        far.copy(read, source)
        del source
        near.drain()
        assert near._deferred_free._deferred
        near.trim()
        assert not near._deferred_free._deferred
        assert here.heap.used(0) == 0
        assert same(read.numpy(), data((SIZE,), seed=1))


def test_trim_leaves_a_callers_memory_deferred(gpus):
    gpus(0, num_gpus=1)
    with open_mesh(1, backend="cuda") as mesh:
        device = mesh.devices[0]
        out, theirs = device.empty((SIZE,), FLOAT), on_gpu(0, data((SIZE,)))
        add(device, out, device.put(theirs))
        del theirs
        device.trim()
        assert device._deferred_free._deferred
        device.synchronize()
        assert not device._deferred_free._deferred
        assert same(out.numpy(), data((SIZE,)))


RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def own_gpus() -> list[int]:
    with gr.open_mesh(backend="cuda", processes="none") as mesh:
        return [device.physical for device in mesh]


@pytest.mark.parametrize("rank", RANKS)
def test_one_of_several_processes_has_the_gpu_of_its_local_rank(gpus, monkeypatch, rank):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    gpus(0, num_gpus=3)
    assert own_gpus() == [0, 1, 2]  # one process
    with pytest.raises(BackendUnavailableError, match="GPU 3, but CuPy sees only GPUs 0 to 2"):
        gr.open_mesh([0, 3], backend="cuda")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RuntimeError, match="processes='none'"):
        gr.open_mesh(backend="cuda")
    with gr.open_mesh(2, backend="cuda", processes="none") as mesh:
        assert [device.physical for device in mesh] == [0, 1]
    for value in ("", "two", "-1"):
        monkeypatch.setenv(rank, value)
        with pytest.raises(BackendUnavailableError, match=r"LOCAL_RANK, .*: pass devices="):
            own_gpus()
    monkeypatch.setenv(rank, "3")
    with pytest.raises(BackendUnavailableError, match=f"{rank}=3, .* 3 GPUs.*: pass devices="):
        own_gpus()
    for name in RANKS[RANKS.index(rank) + 1 :]:  # that of torchrun comes first
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv(rank, "2")
    assert own_gpus() == [2]
    gpus(0, num_gpus=1)  # the launcher hides the others
    assert own_gpus() == [0]


def test_a_missing_gpu_or_driver_raises(monkeypatch):
    runtime = sys.modules["cupy.cuda.runtime"]
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(BackendUnavailableError, match="sees no GPU"):
        streams.visible_gpus()

    def refuses() -> int:
        raise surface.CUDARuntimeError("cudaErrorInsufficientDriver: too old")

    monkeypatch.setattr(runtime, "getDeviceCount", refuses)
    with pytest.raises(BackendUnavailableError, match="cudaErrorInsufficientDriver"):
        gr.open_mesh(backend="cuda")


def test_peer_access_is_enabled_where_there_is_any(gpus, monkeypatch):
    gpus(3)
    pairs = {(0, 1), (1, 0)}
    assert streams.enable_peer_access([0, 1]) == pairs
    assert streams.enable_peer_access([0, 1]) == pairs  # a second mesh
    gpus(3, peers=False)
    assert streams.enable_peer_access([0, 1]) == set()

    def refuses(device) -> None:
        raise surface.CUDARuntimeError("cudaErrorUnknown: unknown error")

    gpus(3)
    monkeypatch.setattr(sys.modules["cupy.cuda.runtime"], "deviceEnablePeerAccess", refuses)
    with pytest.raises(surface.CUDARuntimeError, match="unknown error"):
        streams.enable_peer_access([0, 1])


def test_a_gpu_with_too_many_peers_copies_from_the_others(gpus):
    here = gpus(3, num_gpus=4, most_peers=2)
    with open_mesh(4, backend="cuda") as mesh:
        pairs = {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (3, 0), (3, 1)}
        assert mesh.mesh_state.peer_access == here.peers == pairs
        assert summed(mesh) == [10] * 4


def test_peer_access_that_corrupts_data_is_not_used(gpus, monkeypatch, caplog):
    here = gpus(3, num_gpus=3)
    here.corrupt = {(0, 2), (2, 1)}
    monkeypatch.setattr(streams, "_is_intact", streams._is_intact.__wrapped__)
    with open_mesh(3, backend="cuda") as mesh:
        assert mesh.mesh_state.peer_access == here.peers == {(0, 1), (1, 0), (1, 2), (2, 0)}
        assert summed(mesh) == [6] * 3
    said = "copies between GPUs {} and {} corrupt data, so their peer access is not used"
    for record, pair in zip(caplog.records, sorted(here.corrupt), strict=True):
        assert said.format(*pair) in record.message


def summed(mesh: Mesh) -> list[float]:
    """The result of an all-reduce of 1, 2, … on each device."""
    grads = [[np.full(9, device.index + 1, np.float32)] for device in mesh]
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    rows = ops.all_reduce(grads, op=gr.ReduceOp.SUM, output_type="buffer")
    return [row[0].numpy()[0] for row in rows]


@pytest.mark.whole_product
@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_an_ended_mesh_frees_no_memory_that_another_gpu_reads(here, end):
    mesh = open_mesh([0, 1], backend="cuda")
    near, far = mesh.devices
    source, target = uploaded(near, 1), far.empty((SIZE,), FLOAT)
    far.copy(target, source, queue="transfer")
    if end == "closed":
        mesh.close()
        del source  # frees its memory at once
    else:
        del source
        near.__del__()  # as the garbage collector calls it
    here.settle()  # would read freed memory


@pytest.fixture
def shapes(monkeypatch) -> list[tuple]:
    """The grid and the block of each launch."""
    found, call = [], cupy.cuda.Function.__call__

    def noted(self, grid, block, *arguments, **options):
        found.append((grid, block))
        call(self, grid, block, *arguments, **options)

    monkeypatch.setattr(cupy.cuda.Function, "__call__", noted)
    return found


@pytest.mark.parametrize(("blocks", "chunks"), [(8, 32), (2, 8)])
def test_a_launch_has_chunks_for_the_blocks_that_the_driver_reports(
    here, shapes, monkeypatch, blocks, chunks
):
    """On 4 multiprocessors."""
    monkeypatch.setattr(compile, "_functions", {})
    monkeypatch.setattr(
        cupy.cuda.driver, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *args: blocks
    )
    with open_mesh([0], backend="cuda") as mesh:
        device = mesh.devices[0]
        size = 32 * 256 * 4  # one vector per thread, 8 blocks per multiprocessor
        out, term = (device.zeros((size,), "float32") for _ in range(2))
        ops.add_n([out], [[term]])
    assert [grid for grid, _ in shapes] == [(chunks,)]


def test_zeros_of_both_signs_are_different_arguments(mesh):
    """The cached arguments of a launch are found by equality, and 0.0 == -0.0."""
    device = mesh.devices[0]
    outs = [device.empty((SIZE,), FLOAT) for _ in range(2)]
    for out, divisor in zip(outs, (0.0, -0.0), strict=True):
        ops.pack([out], [device.upload(np.ones(SIZE, np.float32))], divisor=divisor)
    assert not np.signbit(outs[0].numpy()).any()
    assert np.signbit(outs[1].numpy()).all()


def test_a_large_table_is_uploaded_once_and_a_small_one_never(mesh):
    device = mesh.devices[0]
    values = exact_data((1600,), "float32")
    term, out = device.upload(values), device.zeros(values.shape, "float32")
    rows = [[each.view(8 * row, (8,)) for row in range(200)] for each in (out, term)]
    counts = []
    for num_rows in (INLINE_ROWS, INLINE_ROWS + 1, INLINE_ROWS + 1, 200, 200, INLINE_ROWS + 1):
        with mesh.journal() as journal:
            ops.add_n(rows[0][:num_rows], [[row] for row in rows[1][:num_rows]])
        counts.append(journal.uploads)
    assert counts == [0, 1, 0, 1, 0, 0]
    assert same(out.numpy(), values)


def test_a_table_lives_until_its_launch_is_over(here, monkeypatch):
    """Also if the cache drops it before the launch has begun."""
    monkeypatch.setattr(table, "CACHED_WORDS", 1)
    monkeypatch.setattr(table, "CACHED_TABLES", 1)
    values = exact_data((800,), "float32")
    with open_mesh(1, backend="cuda") as mesh:
        term, out = mesh[0].upload(values), mesh[0].zeros(values.shape, "float32")
        for num_rows in (200, 100, 50, 200, 100):
            size = 800 // num_rows
            outs, terms = ([each.view(size * row, (size,)) for row in range(num_rows)]
                           for each in (out, term))  # fmt: skip
            ops.accumulate_n(outs, [[each] for each in terms], queue="transfer")
        assert same(out.numpy(), 5 * values)


@pytest.mark.parametrize(("threads", "block"), [(1024, 128), (1536, 192), (2048, 256)])
def test_a_launch_has_the_shape_that_the_gpu_asks_for(gpus, shapes, monkeypatch, threads, block):
    """The largest blocks that fit its multiprocessors, smaller for little work; one per chunk."""
    attributes = {**surface.Device(0).attributes, "MaxThreadsPerMultiProcessor": threads}
    monkeypatch.setattr(surface.Device, "attributes", attributes)
    gpus(5)
    with open_mesh([0], backend="cuda") as made:
        device = made.devices[0]
        for size in (8, 200_000):
            values = exact_data((size,), "float32")
            out = device.empty((size,), "float32")
            ops.add_n([out], [[device.upload(values)]])
            assert same(out.numpy(), values)
    chunk = 4 * 4 * block  # four vectors of four floats for each thread
    assert shapes == [((1,), (32,)), ((-(-200_000 // chunk),), (block,))]
