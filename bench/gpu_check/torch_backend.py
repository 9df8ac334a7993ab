"""Tests the backend ``"gradreduce"`` of ``torch.distributed`` in two processes on one GPU."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from measure.in_processes import figures_of_each

import gradreduce.torch.backend

from .setting import hosts, python

NUM_PROCESSES, SIZE = 2, 100_003
DTYPES = ("float16", "bfloat16", "float32", "float64")
SECONDS = 60.0  # for both processes


def term_of(rank: int, dtype: str, device: str) -> Any:
    """Returns small whole numbers, so that every sum and mean is exact."""
    return (torch.arange(2 * SIZE, device=device) % 7 + 2 * rank).to(getattr(torch, dtype))


def compare_sums(device: str, rank: int) -> int:
    """Compares sums, means and shares of them with the exact ones; returns how many."""
    compared = 0
    for dtype in DTYPES:
        total = sum(term_of(each, dtype, device) for each in range(NUM_PROCESSES))
        for op, wanted in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / NUM_PROCESSES)):
            found, term = (term_of(rank, dtype, device) for _ in range(2))
            share, shares = torch.empty_like(term[:SIZE]), wanted.chunk(NUM_PROCESSES)
            dist.all_reduce(found, op)
            dist.reduce_scatter(share, list(term.chunk(NUM_PROCESSES)), op)
            for one, right in ((found, wanted), (share, shares[rank])):
                if not torch.equal(one, right):
                    raise AssertionError(f"{op} of {dtype}: {one} is not {right}")
                compared += 1
    return compared


def gradient_of_ddp(device: str, rank: int) -> Any:
    """Returns the gradient of a layer after one backward of DistributedDataParallel."""
    net = torch.nn.Linear(8, 1, bias=False).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    ddp(torch.full((1, 8), 1.0 + 2 * rank, device=device)).sum().backward()
    return net.weight.grad


def one_of_two(device: str, exact: bool, rank: int, store: str) -> int:
    """Tests one process of two."""
    options = gradreduce.torch.BackendOptions(exact=exact)
    dist.init_process_group(
        "gradreduce", f"file://{store}", rank=rank, world_size=NUM_PROCESSES, pg_options=options
    )
    compared = compare_sums(device, rank)
    gradient = gradient_of_ddp(device, rank)
    if not torch.equal(gradient.cpu(), torch.full((1, 8), 2.0)):
        raise AssertionError(f"the gradient of DDP is {gradient}")
    dist.destroy_process_group()
    return compared + 1


def in_two_processes(device: str, exact: bool) -> int:
    """Tests two processes, which NCCL takes for two hosts; returns how many were compared."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [(device, exact, rank, f"{folder}/store") for rank in range(NUM_PROCESSES)]
        environments = hosts(NUM_PROCESSES, NCCL_MULTI_RANK_GPU_ENABLE="1")
        of = "gpu_check.torch_backend:one_of_two"
        return sum(figures_of_each(of, ranks, python(fake=False), SECONDS, environments))


def compared(quick: bool) -> dict[str, int]:
    return {"compared": in_two_processes("cuda", False) + in_two_processes("cuda", True)}
