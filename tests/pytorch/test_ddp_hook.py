"""``gr.torch.comm_hook``: the buckets of DistributedDataParallel, in processes that are threads.

Each thread has a DDP module over a group of one process, which leaves all reductions to the hook.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.libraries import torch
from support.thread_group import run_processes

import gradreduce as gr
from gradreduce.errors import CollectiveError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
SIZE = 20  # of a layer


def make_net():
    """The same layers in every process; their gradients are integers."""
    layers = [torch.nn.Linear(SIZE, SIZE, bias=index < 2).double() for index in range(3)]
    net = torch.nn.Sequential(*layers)
    for number, parameter in enumerate(net.parameters()):
        torch.nn.init.constant_(parameter, float(number % 3))
    return net


def batch(rank, step=0):
    return torch.full((2, SIZE), float(1 + rank + step), dtype=torch.float64)


def gradients_of(net, x):
    net.zero_grad()
    net(x).sum().backward()
    return [parameter.grad.numpy().copy() for parameter in net.parameters()]


def open_mesh(group, devices=1):
    return gr.open_mesh(devices, backend="sim", process_group=group)


def make_ddp(hook, net=None, **options):
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(net or make_net(), bucket_cap_mb=2**-10, **options)
    ddp.register_comm_hook(None, hook)
    return ddp


@pytest.mark.whole_product
@pytest.mark.parametrize(
    ("size", "option"), [(2, None), (3, None), (2, "static_graph"), (2, "gradient_as_bucket_view")]
)
def test_gradients_are_means_of_all_processes_in_rebuilt_buckets(size, option):
    def work(group):
        with open_mesh(group) as mesh:
            hook = gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh))
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
                    found.append(gradients_of(ddp, batch(group.rank, step)))
        if option != "static_graph":  # otherwise DDP rebuilds its buckets after a step
            assert buckets[0] != buckets[1] == buckets[2]
            assert len(buckets[1]) > 1
        return found

    found = run_processes(size, work)
    for step in range(4):
        alone = [gradients_of(make_net(), batch(rank, step)) for rank in range(size)]
        wanted = [sum(terms) / size for terms in zip(*alone, strict=True)]
        for each in found:
            np.testing.assert_array_equal(np.hstack(list(map(np.ravel, each[step]))),
                                          np.hstack(list(map(np.ravel, wanted))))  # fmt: skip


def test_the_hook_returns_before_other_processes_have_joined():
    has_returned = threading.Event()

    def work(group):
        with open_mesh(group) as mesh:
            ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
            if group.rank == 1:
                assert has_returned.wait(60)
            hook = gr.torch.comm_hook(ops)

            def spy(state, bucket):
                future = hook(state, bucket)
                if group.rank == 0 and bucket.is_last():
                    assert not future.done()
                    has_returned.set()
                return future

            gradients_of(make_ddp(spy), batch(group.rank))

    run_processes(2, work)


def test_a_wire_of_16_bits_halves_the_bytes():
    def work(group):
        with open_mesh(group) as mesh:
            nbytes = []
            for wire_dtype in ("float32", "bfloat16"):
                ops = gr.AllReduceCrossDeviceOps(mesh=mesh, wire_dtype=wire_dtype)
                ddp = make_ddp(gr.torch.comm_hook(ops), make_net().float())
                with mesh.journal() as journal:
                    ddp(batch(group.rank).float()).sum().backward()
                nbytes.append(journal.bytes)
            return nbytes

    for full, half in run_processes(2, work):
        num_elements = 3 * SIZE**2 + 2 * SIZE
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

    def work(group):
        with open_mesh(group) as mesh:
            hook = gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh))
            ddp = make_ddp(hook, make(group.rank), find_unused_parameters=True)
            index = torch.tensor([group.rank, 2])
            with mesh.journal() as journal, ddp.no_sync():
                ddp(index).backward()
            assert journal.records == []
            ddp(index).backward()
            net = ddp.module
            return net.rows.weight.grad.to_dense(), net.used.bias.grad, net.unused.bias.grad

    found = run_processes(2, work)
    for rows, used, _ in found:
        # The first pass, of this process alone, is averaged with the second.
        assert rows.tolist() == [[1, 1], [2, 2], [3, 3], [0, 0]]
        assert used.tolist() == [4]
    assert found[1][2].tolist() == [2]  # process 0 leaves None, which DDP sees in its own group


def test_a_process_that_has_joined_takes_part_with_zeros():
    """DDP's ``join`` calls the hook outside a backward, in a process without data."""

    def work(group):
        with open_mesh(group) as mesh:
            ddp = make_ddp(gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh)))
            found = []
            for step in range(5):
                if group.rank == 0 or step < 2:
                    found.append(gradients_of(ddp, batch(0, step)))
                else:
                    ddp._match_all_reduce_for_bwd_pass()
            return found

    found, _ = run_processes(2, work)
    for step in range(5):
        for mean, alone in zip(found[step], gradients_of(make_net(), batch(0, step)), strict=True):
            np.testing.assert_array_equal(mean, alone if step < 2 else alone / 2)


@pytest.mark.parametrize("ends", ["leaves", "waits"])
def test_backward_raises_our_error_with_the_names_of_the_parameters(ends):
    has_ended = threading.Event()

    def work(group):
        mesh = open_mesh(group)
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


def test_what_cannot_be_a_hook_of_ddp_is_refused():
    mesh = gr.open_mesh(2, backend="sim")
    with pytest.raises(TypeError, match="is not an AllReduceCrossDeviceOps"):
        gr.torch.comm_hook(gr.ReductionToOneDevice())
    with pytest.raises(ValueError, match="has no mesh: pass mesh="):
        gr.torch.comm_hook(gr.AllReduceCrossDeviceOps())
    with pytest.raises(ValueError, match="2 devices in this process; DDP and FSDP"):
        gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh))
    with pytest.raises(ValueError, match="deadline=0"):
        gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh[:1]), deadline=0)


def test_bfloat16_parameters_are_averaged_in_float32():
    def work(group):
        with open_mesh(group) as mesh:
            hook = gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh))
            net = torch.nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
            ddp = make_ddp(hook, net)
            x = (256.0, 1.0, 1.0)[group.rank]  # 256 + 1 is 256 in bfloat16
            ddp(torch.full((1, 3), x, dtype=torch.bfloat16)).backward()
            return net.weight.grad.float().numpy()

    for gradient in run_processes(3, work):
        assert (gradient == np.float32(86)).all()
