"""Exchanges by NCCL between GPUs of several processes, which are threads in these tests."""

import logging
import sys
import threading
import time
from functools import partial
from itertools import permutations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends.cuda.process_meshes import LIBRARIES, here, on_devices, run_groups
from fake_cupy import distributed, nccl
from support.exact_data import same

import gradreduce as gr
from gradreduce.comm.exchange import batches, exchange
from gradreduce.comm.gpu_exchange import connect_gpus
from gradreduce.comm.process_group import ProcessGroup
from gradreduce.device import Mesh
from gradreduce.errors import CollectiveError

__all__ = ["here"]
pytestmark = pytest.mark.fake_cupy
SUM = gr.ReduceOp.SUM
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.int16, np.int64)
SETTINGS = ({}, {"exact": True, "words": 2})  # two words hold three terms of `standard_normal`


def opened(group: ProcessGroup, num_devices: int = 2, **options: Any) -> Mesh:
    return gr.open_mesh([group.rank] * num_devices, backend="cuda", process_group=group, **options)


@pytest.mark.whole_product
@pytest.mark.parametrize("here", [0, 1, 3], indirect=True)
@pytest.mark.parametrize("library", [*LIBRARIES, "cuda:nccl"])
def test_processes_have_the_bits_of_one_without_host_memory(here, library):
    """On a lazy, an eager and a random machine, which find missing waits."""
    counts = (3, 1, 2)
    random = np.random.default_rng(5)
    shapes = [(7,), (0,), (3, 5), (20_011,), (300,)]
    grads = [
        [
            (random.standard_normal(shape) * 100).astype(dtype)
            for shape, dtype in zip(shapes, DTYPES, strict=True)
        ]
        for _ in range(sum(counts))
    ]

    def work(group):
        mesh = opened(group, counts[group.rank], timeout=60)
        mine = grads[sum(counts[: group.rank]) :][: counts[group.rank]]
        values = [on_devices(mesh, list(column)) for column in zip(*mine, strict=True)]
        plays = []
        with mesh.journal() as journal:
            for each in SETTINGS:
                ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 2, mesh=mesh, **each)
                step = ops.prepare(SUM, [(value, value) for value in values])
                plays += step()
        exchanges = journal.of("exchange")
        found = [[buffer.numpy() for buffer in total.buffers] for total in plays]
        mesh.close()
        assert library == "ours" or not group.destroyed
        assert journal.syncs == journal.uploads == 0
        return sum(record.nbytes for record in exchanges), len(exchanges), found

    with gr.open_mesh(sum(counts), backend="sim") as alone:
        made = [
            gr.AllReduceCrossDeviceOps("hierarchical_copy", 2, mesh=alone, **each)
            for each in SETTINGS
        ]
        wanted = [total for ops in made for total in ops.all_reduce(grads, SUM)[0]]
    results = run_groups(library, 3, work)
    for _, num_exchanges, found in results:
        assert num_exchanges > 0
        for total, replicas in zip(wanted, found, strict=True):
            assert all(same(total, each) for each in replicas)
    assert here.counts["init"] == 1  # one rank in each process, however many devices
    to_connect = 3 * 2  # a byte to each other process
    assert here.counts["bytes sent"] == to_connect + sum(nbytes for nbytes, *_ in results)
    assert here.counts["send"] == here.counts["recv"]


def is_over(group: Any, done: set[tuple[int, int, int]]) -> bool:
    return all(message in done for side in group for _, message in side)


def test_both_ends_of_a_message_are_in_the_same_group():
    """Processes send different numbers of messages; most groups have one message."""
    size, pairs = 20, [*permutations(range(20), 2)]
    messages = [(source, target, at) for source, target in pairs
                for at in range(source * target % 50)]  # fmt: skip
    groups = []
    for rank in range(size):
        sends = [(each[1], each) for each in messages if each[0] == rank]
        others = sorted(messages, key=lambda each: (-each[0], each[2]))
        receives = [(each[0], each) for each in others if each[1] == rank]
        found = batches(rank, size, sends, receives)
        assert max([len(side) for group in found for side in group], default=0) <= 128
        assert sum(len(sent) for sent, _ in found) == len(sends)
        assert sum(len(received) for _, received in found) == len(receives)
        groups.append(found)
    done: set[tuple[int, int, int]] = set()
    while any(groups):  # each process waits until all messages of its first group are done
        first = [found[0] for found in groups if found]
        sent = {message for sends, _ in first for _, message in sends}
        done |= sent & {message for _, receives in first for _, message in receives}
        over = [found for found in groups if found and is_over(found[0], done)]
        assert over, "each process waits for another"
        for found in over:
            del found[0]
    assert done == {*messages}
    assert len(batches(0, 8, [(other, None) for other in range(1, 8)] * 16, [])) == 1


def test_rows_and_broadcasts_are_exchanged_too(here):
    def work(group):
        mesh = opened(group, 1)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        count = 1 + group.rank
        rows = gr.IndexedSlices(mesh[0].upload(np.ones((count, 2))), np.arange(count))
        value = gr.PerReplica([rows], mesh)
        total = ops.reduce(SUM, value, value, coalesce=True).values[0]
        array = mesh[0].upload(np.full(3, group.rank))
        copy = ops.broadcast(array, mesh, process=1).values[0]
        found = total.values.numpy()[:, 0].tolist(), copy.numpy().tolist()
        mesh.close()
        return found

    assert run_groups("ours", 2, work) == [([2.0, 1.0], [1, 1, 1])] * 2


@pytest.mark.parametrize("here", [0, 1, 3], indirect=True)
def test_no_byte_of_shares_goes_by_host_memory(here):
    counts = (2, 1, 1)

    def work(group):
        mesh = opened(group, counts[group.rank])
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        shares = [[device.upload(np.full(5, group.rank, np.float32))] for device in mesh]
        with mesh.journal() as journal:
            whole = ops.all_gather(shares)
            again = ops.reduce_scatter(whole)
        assert not {record.kind for record in journal.records} & {"upload", "download", "sync"}
        found = [row[0].numpy().tolist() for row in again]
        mesh.close()
        return found

    for rank, found in enumerate(run_groups("ours", 3, work)):
        assert found == [[float(rank)] * 5] * counts[rank]


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([[0], [0]], "processes 0 and 1 share GPU GPU-ab000000-0000-0000-0000-000000000000, which"),
        ([[0], [1]], "CuPy finds no libnccl"),
    ],
    ids=["a shared GPU", "no libnccl"],
)
def test_where_nccl_cannot_be_used_host_memory_is(here, caplog, monkeypatch, places, said):
    available = places != [[0], [1]]
    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", available)

    def work(group):
        mesh = gr.open_mesh(places[group.rank], backend="cuda", process_group=group)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        total = ops.all_reduce([[np.ones(3)] for _ in mesh], SUM)[0][0]
        mesh.close()
        return total.get().tolist()

    with caplog.at_level(logging.WARNING, "gradreduce"):
        assert run_groups("ours", 2, work) == [[2.0 * len(places[0])] * 3] * 2
    assert "init" not in here.counts
    assert f"through host memory: {said}" in caplog.messages[-1]


def test_an_id_that_process_0_cannot_make_is_an_error_in_all_processes(here, monkeypatch):
    def refuses():
        raise nccl.NcclError(2)

    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "get_unique_id", refuses)

    def work(group):
        with pytest.raises(CollectiveError, match=r"process 0 cannot .*NCCL_ERROR_SYSTEM_ERROR"):
            opened(group)

    run_groups("ours", 3, work)
    assert "init" not in here.counts


def test_a_process_that_does_not_connect_ends_the_opening(here, monkeypatch):
    """It has read the id and hangs in NCCL; the others do not hang."""
    begun = threading.Event()
    init = nccl.NcclCommunicator.__init__

    def hangs(communicator, num_ranks, identity, rank):
        if rank == 1:
            begun.wait(10)
        init(communicator, num_ranks, identity, rank)

    monkeypatch.setattr(nccl.NcclCommunicator, "__init__", hangs)

    def work(group):
        with pytest.raises(CollectiveError, match="NCCL has not connected 2 processes within"):
            opened(group)

    try:
        run_groups("ours", 2, work, timeout=0.3)
    finally:
        begun.set()
    assert nccl.until(lambda: [each._ended for each in nccl.library.made] == ["abort"] * 2)


def test_a_first_exchange_that_does_not_end_ends_the_opening(here):
    def work(group):
        mesh = opened(group, 1)
        mesh.synchronize()
        here.stall(mesh[0])
        with pytest.raises(CollectiveError, match=r"passed: cuda:0 has not finished its queues"):
            connect_gpus(mesh, group, time.monotonic() + 0.2)
        mesh.close()

    try:
        run_groups("ours", 2, work, timeout=60.0)
    finally:
        here.resume()


@pytest.mark.parametrize("here", [0, 1, 3], indirect=True)
def test_an_exchange_is_fenced_as_a_copy_is(here):
    """The machine finds missing waits."""

    def work(group):
        mesh = opened(group, 2)
        device, other = mesh
        for turn in range(2):
            sent = device.upload(np.full(20_000, 1.0 + turn))
            out = device.upload(np.full(20_000, -1.0))
            copied = other.empty(out.shape, out.dtype)
            other.copy(copied, out, queue="transfer")  # reads memory that is overwritten next
            parcels = [[(1 - group.rank, each)] for each in (sent, out)]
            exchange(device, *parcels, "compute")
            device.copy(sent, out, queue="transfer")
            assert (copied.numpy() == -1).all()
            assert (sent.numpy() == 1 + turn).all()
        parcels = [[(1 - group.rank, device.zeros((20_000,), "float64"))] for _ in range(2)]
        exchange(device, *parcels, "transfer")
        del parcels
        for _ in range(3):  # memory of the pool, which the exchange may still use
            device.zeros((20_000,), "float64")
        mesh.close()

    run_groups("ours", 2, work)


def test_a_process_leaves_when_its_exchanges_are_over(here):
    """Then its communicator is aborted, or PyTorch's group is destroyed."""
    left = []

    def free() -> None:
        with here.lock:
            here.stuck -= queues

    def work(group):
        mesh = opened(group, 1)
        value = on_devices(mesh, [np.ones(6, np.float32)])
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        call = partial(ops.batch_reduce, SUM, [(value, value)])
        call()
        mesh.synchronize()
        meet.wait(10)
        queue = here.queues[mesh[0]._streams["compute"].ptr]
        queues.add(queue)
        here.stuck.add(queue)
        threading.Timer(0.05, free).start()
        call()
        post = group.post

        def noted(key, text):
            if key == "closed":
                left.append(queue in here.stuck)
            post(key, text)

        group.post = noted
        mesh.close()

    queues, meet = set(), threading.Barrier(2)
    run_groups("ours", 2, work)
    assert left == [False, False]


@pytest.mark.parametrize(
    ("backend", "said"), [("cuda", "processes 0 and 1 share GPU"), ("sim", "are simulated")]
)
def test_a_group_of_nccl_alone_that_must_send_host_memory_is_an_error(here, backend, said):
    def work(group):
        with pytest.raises(ValueError, match=f"sends only GPU memory, but .*{said}.*make it with"):
            gr.open_mesh([0], backend=backend, process_group=group, timeout=60)

    run_groups("cuda:nccl", 2, work)


def test_the_default_group_is_made_with_nccl_and_destroyed(here, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "here")):
        monkeypatch.setenv(name, value)
    with distributed.installed():
        distributed.make_world(distributed.Store(), 0, 1)
        mesh = gr.open_mesh([0], backend="cuda", processes="torchrun", timeout=60)
        made = sys.modules["torch.distributed"].group.WORLD
        assert (made.config, made.destroyed) == ("cpu:gloo,cuda:nccl", False)
        mesh.close()
        assert made.destroyed
