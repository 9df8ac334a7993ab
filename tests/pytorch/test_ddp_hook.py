"""``gr.torch.comm_hook`` for DDP and ``ReduceScatter`` for FSDP, in processes that are threads.

Each thread has a DDP module over a group of one process, which leaves all reductions to the hook.
"""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support import torch_layers
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import open_mesh

import gradreduce as gr
from gradreduce.errors import CollectiveError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
SIZE = 16  # of a layer; halves of it are multiples of 8 bytes on a wire of 16 bits
make_net = partial(torch_layers.layers, 3, SIZE)
batch = partial(torch_layers.batch, size=SIZE)


def gradients_of(net, x):
    """All gradients of the network, in one vector."""
    net.zero_grad()
    net(x).sum().backward()
    return np.concatenate([parameter.grad.numpy().ravel() for parameter in net.parameters()])


def with_hook(size, work):
    """Calls ``work(mesh, hook)`` in each process; returns the results."""

    def run(group):
        with open_mesh(1, group) as mesh:
            return work(mesh, gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh)))

    return run_processes(size, run)


def make_ddp(hook, net=None, **options):
    ddp = torch.nn.parallel.DistributedDataParallel(
        net or make_net(), bucket_cap_mb=2**-10, **options
    )
    ddp.register_comm_hook(None, hook)
    return ddp


@pytest.mark.whole_product
@pytest.mark.parametrize(
    ("size", "option"), [(2, None), (3, None), (2, "static_graph"), (2, "gradient_as_bucket_view")]
)
def test_gradients_are_means_of_all_processes_in_rebuilt_buckets(size, option):
    def work(mesh, hook):
        buckets = []

        def spy(state, bucket):
            buckets[-1].append(bucket.buffer().numel())
            return hook(state, bucket)

        for _ in range(2):  # the second module has its buckets elsewhere
            ddp = make_ddp(spy, **{option: True} if option else {})
            found = []
            buckets.clear()
            for step in range(4):
                buckets.append([])
                found.append(gradients_of(ddp, batch(mesh.process_index, step)))
        if option != "static_graph":  # otherwise DDP rebuilds its buckets after a step
            assert buckets[0] != buckets[1] == buckets[2]
            assert len(buckets[1]) > 1
        return found

    found = with_hook(size, work)
    for step in range(4):
        alone = [gradients_of(make_net(), batch(rank, step)) for rank in range(size)]
        for each in found:
            np.testing.assert_array_equal(each[step], sum(alone) / size)


def test_the_hook_returns_before_other_processes_have_joined():
    has_returned = threading.Event()

    def work(mesh, hook):
        if mesh.process_index == 1:
            assert has_returned.wait(60)

        def spy(state, bucket):
            future = hook(state, bucket)
            if mesh.process_index == 0 and bucket.is_last():
                assert not future.done()
                has_returned.set()
            return future

        gradients_of(make_ddp(spy), batch(mesh.process_index))

    with_hook(2, work)


def test_a_wire_of_16_bits_halves_the_bytes():
    def work(mesh, hook):
        nbytes = []
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, wire_dtype="bfloat16")
        for each in (hook, gr.torch.comm_hook(ops)):
            ddp = make_ddp(each, make_net().float())
            with mesh.journal() as journal:
                ddp(batch(mesh.process_index).float()).sum().backward()
            nbytes.append(journal.bytes)
        return nbytes

    for full, half in with_hook(2, work):
        num_elements = 3 * (SIZE**2 + SIZE)
        assert full == 4 * num_elements  # half of each term, and half of each sum
        assert full == 2 * half


def test_no_sync_accumulates_and_sparse_gradients_and_unused_parameters_are_reduced():
    def make(rank):
        net = torch.nn.Module()
        net.rows = torch.nn.Embedding(4, 2, sparse=True)
        net.used = torch.nn.Linear(2, 1)
        net.unused = torch.nn.Linear(2, 1)
        net.forward = lambda index: (
            net.used(net.rows(index)).sum() + (net.unused(net.rows(index)).sum() if rank else 0.0)
        )
        for parameter in net.parameters():
            torch.nn.init.ones_(parameter)
        return net

    def work(mesh, hook):
        rank = mesh.process_index
        ddp = make_ddp(hook, make(rank), find_unused_parameters=True)
        index = torch.tensor([rank, 2])
        with mesh.journal() as journal, ddp.no_sync():
            ddp(index).backward()
        assert journal.records == []
        ddp(index).backward()
        net = ddp.module
        return net.rows.weight.grad.to_dense(), net.used.bias.grad, net.unused.bias.grad

    found = with_hook(2, work)
    for rows, used, _ in found:
        # The first pass, of this process alone, is averaged with the second.
        assert rows.tolist() == [[1, 1], [2, 2], [3, 3], [0, 0]]
        assert used.tolist() == [4]
    assert found[1][2].tolist() == [2]  # process 0 leaves None, which DDP sees in its own group


def test_a_process_that_has_joined_takes_part_with_zeros():
    """DDP's ``join`` calls the hook outside a backward, in a process without data."""

    def work(mesh, hook):
        ddp, found = make_ddp(hook), []
        for step in range(5):
            if mesh.process_index == 0 or step < 2:
                found.append(gradients_of(ddp, batch(0, step)))
            else:
                ddp._match_all_reduce_for_bwd_pass()
        return found

    found, _ = with_hook(2, work)
    for step in range(5):
        alone = gradients_of(make_net(), batch(0, step))
        np.testing.assert_array_equal(found[step], alone if step < 2 else alone / 2)


@pytest.mark.parametrize("ends", ["leaves", "waits"])
def test_backward_raises_our_error_with_the_names_of_the_parameters(ends):
    has_ended = threading.Event()

    def work(group):
        mesh = open_mesh(1, group)
        if group.rank == 1:
            if ends == "leaves":
                mesh.mesh_state.fail("it was told to leave")
                mesh.close()
            assert has_ended.wait(10)
            return None
        hook = gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh), deadline=0.2)
        ddp = make_ddp(hook)
        try:
            for _ in range(2):
                with pytest.raises(CollectiveError) as caught:
                    ddp(batch(0)).sum().backward()
                ddp = make_ddp(hook)
        finally:
            has_ended.set()
            mesh.close()
        return str(caught.value)

    text = run_processes(2, work)[0]
    why = {  # the watchdog or the call itself, whichever is first
        "leaves": ["process 1: closed its mesh after 0 calls"],
        "waits": ["the deadline of 0.2 s", "process 1 of 2 has not come to call 0"],
    }
    assert text.startswith("bucket 0 (")
    assert "2.weight" in text
    assert any(each in text for each in why[ends])


def test_what_cannot_be_a_hook_of_ddp_is_refused(mesh):
    make = gr.AllReduceCrossDeviceOps
    for ops, options, error, match in [
        (gr.ReductionToOneDevice(), {}, TypeError, "is not an AllReduceCrossDeviceOps"),
        (make(), {}, ValueError, "has no mesh: pass mesh="),
        (make(mesh=mesh), {}, ValueError, "2 devices in this process; DDP and FSDP"),
        (make(mesh=mesh[:1]), {"deadline": 0}, ValueError, "deadline=0"),
    ]:
        with pytest.raises(error, match=match):
            gr.torch.comm_hook(ops, **options)


def group_of(size):
    return SimpleNamespace(size=lambda: size)


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_each_process_gets_its_share_in_the_wire_dtype(op):
    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            ops = gr.AllReduceCrossDeviceOps(mesh=mesh, wire_dtype="bfloat16")
            scatter = gr.torch.ReduceScatter(ops)
            device = torch.device("cpu")
            inputs = scatter.allocate((64,), dtype=torch.float32, device=device)
            inputs.copy_(torch.arange(64.0) * (1 + group.rank))
            share = scatter.allocate((32,), dtype=torch.float32, device=device)
            with mesh.journal() as journal:
                scatter(share, inputs, group_of(2), getattr(torch.distributed.ReduceOp, op))
            return share.tolist(), journal.bytes

    factor = {"SUM": 3.0, "AVG": 1.5}[op]
    (first, sent), (second, _) = run_processes(2, work)
    assert first + second == [factor * number for number in range(64)]
    assert sent == 2 * 32


def test_other_groups_and_operations_are_refused():
    with gr.open_mesh(1, backend="sim", process_group=torch.distributed.group.WORLD) as mesh:
        scatter = gr.torch.ReduceScatter(gr.AllReduceCrossDeviceOps(mesh=mesh))
        with pytest.raises(ValueError, match="over 2 processes, but the mesh has 1"):
            scatter(torch.empty(1), torch.empty(2), group_of(2), torch.distributed.ReduceOp.SUM)
        with pytest.raises(ValueError, match="MAX is neither SUM nor AVG"):
            scatter(torch.empty(1), torch.empty(1), group_of(1), torch.distributed.ReduceOp.MAX)
        with pytest.raises(TypeError, match="is not an AllReduceCrossDeviceOps"):
            gr.torch.ReduceScatter(mesh)
