"""Calls of ``torch.distributed`` over the backend ``"gradreduce"``, in each process of torchrun."""

import itertools
import os
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import gradreduce as gr
import gradreduce.torch.backend

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Reference:
    """Sums of one process with a simulated device for each process of the group."""

    def __init__(self, ranks: list[int], **options: Any) -> None:
        self.ranks = ranks
        mesh = gr.open_mesh(len(ranks), backend="sim", processes="none")
        self.ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh, **options)

    def of(self, term: Any, op: Any) -> torch.Tensor:
        kind = gr.ReduceOp.SUM if op == SUM else gr.ReduceOp.MEAN
        return self.ops.all_reduce([[term(rank)] for rank in self.ranks], kind)[0][0]


def random(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(100).to(dtype)


def sums(reference: Reference, group: Any) -> None:
    """An all-reduce and a reduce have the bits of one process."""
    me = dist.get_rank()
    for op, dtype, shape in itertools.product((SUM, AVG), DTYPES, ((), (0,), (3, 5), (20000,))):
        term = partial(random, shape=shape, dtype=dtype)
        wanted = reference.of(term, op)
        found = term(me)
        work = dist.all_reduce(found, op, group, async_op=True)
        assert work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert torch.equal(work.get_future().wait()[0], wanted), (op, dtype, shape)
        assert found.equal(wanted) and work.result()[0] is found
        root = reference.ranks[-1]
        found = term(me)
        dist.reduce(found, root, op, group)
        assert found.equal(wanted if me == root else term(me))


def shares(reference: Reference, group: Any) -> None:
    """Every spelling of a reduce-scatter."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    me = reference.ranks[rank]
    for op, dtype in itertools.product((SUM, AVG), DTYPES):
        term = partial(random, shape=(size * 2, 3), dtype=dtype)
        whole, wanted = term(me), reference.of(term, op)[2 * rank : 2 * rank + 2]
        found = torch.zeros(2, 3, dtype=dtype)
        dist.reduce_scatter(found, list(whole.chunk(size)), op, group)
        assert found.equal(wanted)
        dist.reduce_scatter_single(found.zero_(), whole, op, group)
        assert found.equal(wanted)
        part = whole[2 * rank : 2 * rank + 2]  # in place
        dist.reduce_scatter_single(part, whole, op, group)
        assert part.equal(wanted)
        group.reduce_scatter(found.zero_(), list(term(me).chunk(size)), op).wait()
        assert found.equal(wanted)


def spellings(reference: Reference, group: Any) -> None:
    """Tensors that are not in C order or need gradients, and methods of groups."""
    rank = dist.get_rank(group)
    me = reference.ranks[rank]
    columns = partial(random, shape=(3, 4))
    found = columns(me).t()
    dist.all_reduce(found, group=group)
    assert found.equal(reference.of(columns, SUM).t())
    found = columns(me)
    group.allreduce(found, SUM, timedelta(seconds=60)).wait()
    assert found.equal(reference.of(columns, SUM))
    group.reduce(found := columns(me), 0, AVG).wait()
    assert found.equal(reference.of(columns, AVG) if rank == 0 else columns(me))
    leaf = columns(me).requires_grad_()
    dist.all_reduce(leaf, group=group)
    assert leaf.detach().equal(reference.of(columns, SUM))


def repeated(reference: Reference, group: Any) -> None:
    """Small sums are prepared at the second call, also if others come between."""
    me = dist.get_rank()
    for number in range(4):
        for op, size in itertools.product((SUM, AVG), (7, 16384, 16385)):
            term = partial(random, shape=(size,), seed=number)
            dist.all_reduce(found := term(me), op, group)
            assert found.equal(reference.of(term, op)), (number, op, size)


def coalesced(reference: Reference, group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    me = reference.ranks[rank]
    terms = [partial(random, shape=shape) for shape in ((size,), (size * 2, 3))]
    wanted = [reference.of(term, SUM) for term in terms]
    found = [term(me) for term in terms]
    with c10d._coalescing_manager(group):
        for tensor in found:
            dist.all_reduce(tensor, group=group)
    assert all(map(torch.equal, found, wanted))
    found = [torch.zeros(1), torch.zeros(2, 3)]
    with c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor, term in zip(found, terms, strict=True):
            dist.reduce_scatter_single(tensor, term(me), group=group)
    manager.wait()
    assert all(
        each.equal(whole.chunk(size)[rank]) for each, whole in zip(found, wanted, strict=True)
    )
    found = [term(me) for term in terms]
    with c10d._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        group.allreduce([found[0]]).wait()
        group.allreduce([found[1]])
    manager.wait()
    assert all(map(torch.equal, found, wanted))


def other_sums(group: Any, ranks: list[int]) -> None:
    """Reductions that the inner group does."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = sum(range(size))
    for tensor, op, wanted in (
        (torch.tensor([rank, 1]), SUM, [total, size]),
        (torch.tensor([float(rank)]), dist.ReduceOp.MAX, [size - 1.0]),
        (torch.tensor([rank + 1j]), SUM, [total + size * 1j]),
        (torch.tensor([rank + 1]), dist.ReduceOp.MIN, [1]),
    ):
        dist.all_reduce(tensor, op, group)
        assert tensor.tolist() == wanted
    for _ in range(2):
        share = torch.tensor([0])
        dist.reduce_scatter_single(share, torch.arange(size) + rank, group=group)
        assert share.item() == rank * size + total
        dist.reduce_scatter(share, list((torch.arange(size) + rank).chunk(size)), group=group)
        assert share.item() == rank * size + total
    one = torch.tensor([rank])
    dist.reduce(one, ranks[0], group=group)
    assert rank != 0 or one.item() == total
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,), check_invariants=True)
    dist.all_reduce(sparse, group=group)
    assert sparse.to_dense().tolist() == [1.0] * size


def copies(group: Any, ranks: list[int]) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensor = torch.full((2,), float(rank))
    dist.broadcast(tensor, ranks[1], group)
    assert tensor.tolist() == [1.0, 1.0]
    found = [torch.zeros(1) for _ in ranks]
    dist.all_gather(found, torch.tensor([float(rank)]), group)
    assert [each.item() for each in found] == list(range(size))
    whole = torch.zeros(size)
    dist.all_gather_single(whole, torch.tensor([float(rank)]), group)
    assert whole.tolist() == list(range(size))
    dist.all_to_all_single(whole, torch.full((size,), float(rank)), group=group)
    assert whole.tolist() == list(range(size))
    dist.scatter(whole[:1], list(torch.ones(size).chunk(size)) * (rank == 0), ranks[0], group)
    assert whole[0] == 1
    found = [None] * size
    dist.all_gather_object(found, rank, group)
    assert found == list(range(size))
    dist.barrier(group)


def messages(group: Any, ranks: list[int]) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # The receive is first in one process and the sum in the others.
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.send(torch.ones(40000), ranks[1], group)
        work.wait()
    elif rank == 1:
        dist.recv(tensor := torch.zeros(40000), ranks[0], group)
        assert tensor.sum() == 40000
    if rank != 0:
        dist.all_reduce(torch.ones(3), group=group)
    peers = [ranks[(rank + 1) % size], ranks[(rank - 1) % size]]
    sent, received = torch.full((3,), float(rank)), torch.zeros(3)
    batch = [dist.P2POp(dist.isend, sent, peers[0], group)]
    batch.append(dist.P2POp(dist.irecv, received, peers[1], group))
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert received[0] == (rank - 1) % size


def in_order(group: Any) -> None:
    """Calls that nobody waits for run in the order of submission, sums and others."""
    size = dist.get_world_size(group)
    tensor, works, expected = torch.full((3,), 0.5), [], 0.5
    for number in range(4):  # a sum is size * x, a product x ** size: no other order gives this
        op = dist.ReduceOp.PRODUCT if number % 2 else SUM
        works.append(dist.all_reduce(tensor, op, group, async_op=True))
        expected = expected**size if number % 2 else expected * size
    futures = [work.get_future().then(lambda done: done.value()[0][0].item()) for work in works]
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    assert futures[-1].wait() == expected == tensor[0]


def callbacks(reference: Reference, group: Any) -> None:
    """Callbacks call their own group; each process makes the calls in the same order."""
    me = dist.get_rank()
    terms = [partial(random, shape=(5,), seed=seed) for seed in range(6)]
    found = [term(me) for term in terms]
    futures = []
    for first, second in zip(found[::2], found[1::2], strict=True):
        future = dist.all_reduce(first, group=group, async_op=True).get_future()

        def add(_: Any, tensor: torch.Tensor = second) -> None:
            dist.all_reduce(tensor, group=group)

        futures.append(future.then(add))
    torch.futures.wait_all(futures)
    assert all(map(torch.equal, found, [reference.of(term, SUM) for term in terms]))


def mistakes(group: Any) -> None:
    rank = dist.get_rank(group)
    shapes = rf"float32\[{3 + rank}\]"
    message = (
        rf"all_reduce 0 of group '\d+' \({shapes}\): the processes pass different tensors: "
        rf"tensor 0 is {shapes} in process {rank}, float32\[\d\] in process \d"
    )
    with pytest.raises(ValueError, match=message):
        dist.all_reduce(torch.ones(3 + rank), group=group)
    future = dist.all_reduce(torch.ones(3 + rank), group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="different tensors"):
        future.wait()


def late(ranks: list[int]) -> None:
    """The process that does not come is named, with the call, at the deadline of the group."""
    group = dist.new_group(ranks)
    dist.all_reduce(torch.ones(5), group=group)
    group.set_timeout(timedelta(seconds=1))
    if dist.get_rank() != 1:
        message = r"^all_reduce 1 of group '\d+' \(float32\[5\]\): .*process 1 of \d did not answer"
        with pytest.raises(gr.errors.CollectiveError, match=message):
            dist.all_reduce(torch.ones(5), group=group)
    dist.barrier()
    with pytest.raises(gr.errors.CollectiveError):
        dist.all_reduce(torch.ones(5), group=group)


def options() -> None:
    """Differences of options are told; groups have those of the default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD.options == gr.torch.BackendOptions(wire_dtype="float32")
    pair = dist.new_group([0, 1])
    exact = dist.new_group(range(size), pg_options=gr.torch.BackendOptions(exact=True))
    assert exact.options.exact
    if rank < 2:
        assert pair.options is dist.group.WORLD.options
    tensor = torch.tensor([[1e8, 0.1, -1e8, 0.0][rank]])
    dist.all_reduce(tensor, group=exact)
    if size == 4:
        assert tensor.item() == torch.tensor(0.1).item()
    wide = torch.tensor([[1e18, 0.1, -1e18, 0.0][rank]], dtype=torch.float64)
    dist.all_reduce(wide, group=exact)
    if size == 4:
        assert wide.item() == 0.1
    differing = gr.torch.BackendOptions(exact=rank == 1)
    message = r"BackendOptions\(\) in process 0, BackendOptions\(exact=True\) in process 1"
    with pytest.raises(ValueError, match=message):
        dist.new_group(range(size), pg_options=differing)
    wrong = TypeError if rank == 1 else ValueError
    with pytest.raises(wrong, match=r"pg_options=3 must be gr\.torch\.BackendOptions or None"):
        dist.new_group(range(size), pg_options=3 if rank == 1 else None)


def main() -> None:
    os.environ["GRADREDUCE_WIRE_DTYPE"] = "float32"
    dist.init_process_group("gradreduce", timeout=timedelta(seconds=60))
    assert dist.get_backend() == dist.group.WORLD.name() == "gradreduce"
    dist.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="processes='auto'"):
        gr.default_mesh()  # the mesh of the group is private
    world = list(range(dist.get_world_size()))
    pair = dist.new_group([1, 0])
    for ranks, group in ((world, dist.group.WORLD), ([0, 1], pair)):
        if dist.get_rank() in ranks:
            reference = Reference(ranks, wire_dtype="float32")
            for check in (sums, shares, spellings, repeated, coalesced, callbacks):
                check(reference, group)
            for check in (other_sums, copies, messages):
                check(group, ranks)
            in_order(group)
    options()
    mistakes(dist.new_group(world))
    late(world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("done", flush=True)
