"""``gr.torch.weighted`` for the hook of DDP and FSDP2's reduce-scatter; processes are threads."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import (
    assert_equal,
    batch,
    fully_sharded,
    gradients,
    layers,
    open_mesh,
    plain,
)  # fmt: skip

import gradreduce as gr

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
NAN = float("nan")


def make_ddp(mesh, make=layers, **options):
    ddp = torch.nn.parallel.DistributedDataParallel(make(), bucket_cap_mb=2**-10, **options)
    ddp.register_comm_hook(None, gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh)))
    return ddp


def in_ddp(size, work, **options):
    def run(group):
        with open_mesh(1, group) as mesh:
            return work(make_ddp(mesh, **options), mesh)

    return run_processes(size, run)


def sum_of(terms):
    """The sum of weight * gradient over pairs of a weight and a batch."""
    rows = []
    for weight, x in terms:
        net = layers()
        plain(net, x).backward()
        rows.append([weight * each for each in gradients(net)])
    return [sum(column) for column in zip(*rows, strict=True)]


def weight_of(rank, step, micro):
    return 0 if step == 3 and rank == 0 else 1 + (rank + 2 * micro + step) % 4


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_divides_by_the_weights_of_the_whole_period(size):
    """Step 1 has no weights. In step 3 the micro-batches of process 0 have none, and NaN."""

    def run(ddp, rank, step, micro):
        weight = weight_of(rank, step, micro)
        loss = plain(ddp, batch(rank + 4 * micro, step))
        if step != 1:
            loss = gr.torch.weighted(loss if weight else loss * NAN, weight, ddp)
        loss.backward()

    def work(ddp, mesh):
        found = []
        for step in range(4):
            ddp.zero_grad()
            for micro in range(3):
                with ddp.no_sync() if micro < 2 else nullcontext():
                    run(ddp, mesh.process_index, step, micro)
            found.append(gradients(ddp))
        return found

    places = list(product(range(size), range(3)))
    for found in in_ddp(size, work):
        for step, each in enumerate(found):
            weights = [weight_of(rank, step, micro) if step != 1 else 1 for rank, micro in places]
            total = size if step == 1 else sum(weights)
            batches = [batch(rank + 4 * micro, step) for rank, micro in places]
            terms = sum_of(zip(weights, batches, strict=True))
            assert_equal(each, [term / total for term in terms])


def test_weights_of_1_change_no_bit():
    def work(ddp, mesh):
        found = []
        for weight in (None, 1, 1, None):
            ddp.zero_grad()
            loss = plain(ddp, batch(mesh.process_index)) / 3
            (loss if weight is None else gr.torch.weighted(loss, weight, ddp)).backward()
            found.append(gradients(ddp))
        return found

    for found in in_ddp(3, work):
        for each in found[1:]:
            assert_equal(found[0], each)


def test_weights_of_0_are_an_error_after_which_ddp_works():
    def work(ddp, mesh):
        for _ in range(3):
            loss = gr.torch.weighted(plain(ddp, batch(0)), 0, ddp)
            assert loss == 0
            with pytest.raises(ValueError, match="all micro-batches of this step are 0"):
                loss.backward()
            assert not any([each.any() for each in gradients(ddp)])
            gr.torch.weighted(plain(ddp, batch(0)), 1 - mesh.process_index, ddp).backward()
            assert_equal(gradients(ddp), sum_of([(1, batch(0))]))
            ddp.zero_grad(set_to_none=False)

    in_ddp(2, work)


def test_sparse_gradients_are_divided_by_the_weights():
    def embedding():
        return torch.nn.Embedding(4, 2, sparse=True).double()

    def work(ddp, mesh):
        weight = 3 - 2 * mesh.process_index
        gr.torch.weighted(ddp(torch.tensor([1, mesh.process_index])).sum(), weight, ddp).backward()
        return ddp.module.weight.grad.to_dense()[:, 0].tolist()

    assert in_ddp(2, work, make=embedding) == [[3 / 4, 5 / 4, 0, 0]] * 2


def test_micro_batches_of_a_failed_backward_are_not_counted():
    def work(ddp, mesh):
        def fail(_):
            raise ZeroDivisionError

        with ddp.no_sync():
            gr.torch.weighted(plain(ddp, batch(0)), 7, ddp).backward()
            x = batch(0).requires_grad_()
            x.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                gr.torch.weighted(plain(ddp, x), 7, ddp).backward()
        ddp.zero_grad()
        weight = 1 + mesh.process_index
        gr.torch.weighted(plain(ddp, batch(mesh.process_index)), weight, ddp).backward()
        return gradients(ddp)

    wanted = [each / 3 for each in sum_of([(1, batch(0)), (2, batch(1))])]
    for found in in_ddp(2, work):
        assert_equal(found, wanted)


def local(parameters):
    return [each.grad.full_tensor() for each in parameters]


def test_fsdp_divides_by_the_weights_of_the_whole_period():
    with gr.open_mesh(1, backend="sim", process_group=torch.distributed.group.WORLD) as mesh:
        net = fully_sharded(mesh)
        for step in range(3):
            net.zero_grad()
            terms = [(weight, batch(weight, step)) for weight in (2, 5, 1)]
            for weight, x in terms:
                net.set_requires_gradient_sync(weight == 1)
                loss = plain(net, x)
                (loss if step == 1 else gr.torch.weighted(loss, weight, net)).backward()
            total = 1 if step == 1 else 8
            factors = [(1, x) for _, x in terms] if step == 1 else terms
            assert_equal(local(net.parameters()), [each / total for each in sum_of(factors)])
        net.zero_grad()
        with pytest.raises(ValueError, match="all micro-batches of this step are 0"):
            gr.torch.weighted(plain(net, batch(0)), 0, net).backward()
        net.zero_grad()
        gr.torch.weighted(plain(net, batch(0)), 3, net).backward()
        assert_equal(local(net.parameters()), sum_of([(1, batch(0))]))


def test_each_process_of_fsdp_gets_its_share_of_the_weighted_mean():
    """Processes that are threads share no group of PyTorch: the reduce-scatter is called alone."""
    from types import SimpleNamespace

    from gradreduce.torch.weighted import Period

    group = SimpleNamespace(size=lambda: 2)
    reduce_op = torch.distributed.ReduceOp

    def work(processes):
        with open_mesh(1, processes) as mesh:
            scatter = gr.torch.ReduceScatter(gr.AllReduceCrossDeviceOps(mesh=mesh))
            period = Period(mesh)
            scatter.use_period(period)
            found = []
            for weights in ((3, 1), (0, 5), (2, 0), (0, 0)):
                weight = weights[processes.rank]
                one = torch.ones((), requires_grad=True, dtype=torch.float64)
                inputs = weight * torch.arange(4.0) if weight else torch.full((4,), NAN)
                share = torch.empty(2)

                def reduce(_, share=share, inputs=inputs):
                    with pytest.raises(ValueError, match="divides a sum by the number"):
                        scatter(share, inputs, group, reduce_op.SUM)
                    scatter(share, inputs, group, reduce_op.AVG)

                one.register_hook(reduce)
                loss = gr.torch.weighted.__globals__["_Weigh"].apply(one * 1, weight, period)
                with (
                    nullcontext()
                    if any(weights)
                    else pytest.raises(ValueError, match="micro-batches of this step are 0")
                ):
                    loss.backward()
                found.append(share.tolist())
            return found

    one, other = run_processes(2, work)
    assert one == [[0, 1], [0, 1], [0, 1], [0, 0]]
    assert other == [[2, 3], [2, 3], [2, 3], [0, 0]]


def test_models_that_do_not_divide_by_weights_are_refused():
    loss = torch.ones((), requires_grad=True)
    weighted = partial(gr.torch.weighted, loss, 1)
    with gr.open_mesh(1, backend="sim", process_group=torch.distributed.group.WORLD) as mesh:
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
        ddp = torch.nn.parallel.DistributedDataParallel(layers())
        with pytest.raises(ValueError, match=r"model has not gr\.torch\.comm_hook"):
            weighted(ddp)
        with pytest.raises(TypeError, match=r"use `with model\.weight\(w\): loss\.backward\(\)`"):
            weighted(gr.torch.DataParallel(layers(), mesh))
        with pytest.raises(TypeError, match="is neither a DistributedDataParallel nor the root"):
            weighted(layers())
        with pytest.raises(TypeError, match=r"loss=2\.0 is not a tensor"):
            gr.torch.weighted(2.0, 1, make_ddp(mesh))
        with pytest.raises(ValueError, match="weight=-1 must be a finite number of at least 0"):
            gr.torch.weighted(loss, -1, make_ddp(mesh))
        net = fully_sharded(mesh)
        plain(net, batch(0))
        with pytest.raises(ValueError, match="is inside another module of fully_shard"):
            weighted(net[1])
        net[2].set_all_reduce_hook(lambda grads: None)
        with pytest.raises(ValueError, match="2 averages copies of its shards"):
            weighted(net)
        default = torch.distributed.fsdp.fully_shard(layers(1), mesh=None)
        with pytest.raises(ValueError, match=r"the root has not gr\.torch\.ReduceScatter"):
            weighted(default)
        assert weighted(make_ddp(mesh)) == 1 and ops.mesh is mesh
