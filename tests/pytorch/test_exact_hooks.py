"""Exact sums in the hook of DDP and in FSDP2's reduce-scatter, in processes that are threads."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from support.exact_sums import adversarial_terms, exact_means, exact_sums
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import open_mesh

import gradreduce as gr
from gradreduce.device import as_dtype

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
COUNTS = (40, 7, 90)  # elements of the parameters
WEIGHTS = {None: None, "weights": (3.0, 0.1, 0.0)}
DTYPES = ("float32", "bfloat16", "float16")


class Given(object if torch is None else torch.nn.Module):
    """The gradients of its parameters are the numbers of its input."""

    def __init__(self, dtype):
        super().__init__()
        self.all = torch.nn.ParameterList(
            [torch.zeros(count, dtype=getattr(torch, dtype)) for count in COUNTS]
        )

    def forward(self, terms):
        rows = zip(self.all, terms.split(COUNTS), strict=True)
        return sum([(parameter * row).sum() for parameter, row in rows])


def tensor_of(term):
    return torch.tensor(term.astype(np.float32)).to(getattr(torch, term.dtype.name))


def wanted_of(terms, weights):
    """A weight is multiplied into the gradient by PyTorch, in the gradient's dtype."""
    if weights is None:
        return exact_means(terms, float(len(terms)))
    rows = [
        (tensor_of(term) * torch.tensor(weight, dtype=getattr(torch, term.dtype.name)))
        for term, weight in zip(terms, weights, strict=True)
        if weight
    ]
    scaled = [row.float().numpy().astype(terms[0].dtype) for row in rows]
    return exact_means(scaled, sum(weights), terms[0].dtype)


def same(found, wanted):
    return np.array_equal(found, wanted.astype(np.float32), equal_nan=True) and np.array_equal(
        np.signbit(found[found == 0]), np.signbit(wanted[found == 0].astype(np.float32))
    )


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ddp_has_the_bits_of_the_real_sums_in_any_buckets_and_order(dtype, weights):
    """Also in prepared steps, the third and fourth ones."""
    terms, weights = adversarial_terms(3, sum(COUNTS), dtype, seed=5), WEIGHTS[weights]
    wanted = wanted_of(terms, weights)

    def work(group, order, bucket_mb):
        index = order[group.rank]
        with open_mesh(1, group) as mesh:
            ops = gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)
            net = Given(dtype)
            ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
            ddp.register_comm_hook(None, gr.torch.comm_hook(ops))
            for _ in range(4):
                ddp.zero_grad()
                loss = ddp(tensor_of(terms[index]))
                if weights is not None:
                    loss = gr.torch.weighted(loss, weights[index], ddp)
                loss.backward()
                found = torch.cat([each.grad for each in net.all]).float().numpy()
                assert same(found, wanted), (found, wanted)

    for order, bucket_mb in (((0, 1, 2), 2**-13), ((2, 0, 1), 25)):
        run_processes(3, lambda group, place=(order, bucket_mb): work(group, *place))


@pytest.mark.parametrize("op", ["SUM", "AVG", "weights"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reduce_scatter_of_fsdp_has_the_bits_of_the_real_sums(dtype, op):
    terms, weights = adversarial_terms(2, 96, dtype, seed=6), (3.0, 0.1)
    if op == "weights":
        wanted = exact_means(terms, sum(weights), as_dtype(dtype))
    else:
        wanted = exact_sums(terms) if op == "SUM" else exact_means(terms, 2.0)
    kind = torch.distributed.ReduceOp.SUM if op == "SUM" else torch.distributed.ReduceOp.AVG

    def work(group):
        module = import_module("gradreduce.torch.weighted")  # the attribute is its function
        with open_mesh(1, group) as mesh:
            scatter = gr.torch.ReduceScatter(gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True))
            period, share = (
                module.Period(mesh),
                torch.empty(48, dtype=getattr(torch, dtype)),
            )
            scatter.use_period(period)

            def reduce(_):
                scatter(share, tensor_of(terms[group.rank]), SimpleNamespace(size=lambda: 2), kind)

            one = torch.ones((), requires_grad=True)
            one.register_hook(reduce)
            loss = one * 1
            if op == "weights":  # of the period; the gradients are given
                loss = module._Weigh.apply(loss, weights[group.rank], period)
            loss.backward()
            return share.float().numpy()

    assert same(np.concatenate(run_processes(2, work)), wanted)
