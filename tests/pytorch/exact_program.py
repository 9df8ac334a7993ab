"""Trains by exact sums, in each process of torchrun; prints digests of the parameters.

Tests call the functions in one process, too.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import gradreduce as gr

COUNT, STEPS = 8, 3  # micro-batches of a step


def make_net() -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    rng = np.random.default_rng(0)
    for parameter in net.parameters():
        parameter.data = torch.tensor(rng.standard_normal(parameter.shape), dtype=torch.float32)
    return net


def loss_of(net: Any, step: int, number: int) -> Any:
    rng = np.random.default_rng((step, number))
    return net(torch.tensor(rng.standard_normal((2, 5)), dtype=torch.float32)).square().mean()


def exact(mesh: gr.Mesh) -> gr.AllReduceCrossDeviceOps:
    return gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)


def digest(net: Any) -> str:
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in net.parameters()]
    return hashlib.sha256(b"".join([each.detach().numpy().tobytes() for each in whole])).hexdigest()


def data_parallel(mesh: gr.Mesh, rows: Sequence[Sequence[int]], *, weighted: bool = True) -> str:
    """Trains replicas that have these micro-batches."""
    dp = gr.torch.DataParallel(make_net(), mesh, ops=exact(mesh))
    optimizer = torch.optim.SGD(dp.parameters(), 0.1)
    for step in range(STEPS):
        dp.zero_grad()
        for micro in range(len(rows[0])):
            with nullcontext() if micro == len(rows[0]) - 1 else dp.no_sync():
                for net, row in zip(dp.replicas, rows, strict=True):
                    with dp.weight(1) if weighted else nullcontext():
                        loss_of(net, step, row[micro]).backward()
        optimizer.step()
    return digest(dp.module)


def ddp(mesh: gr.Mesh, number: int, bucket_mb: float) -> str:
    """Trains DDP; this process has one micro-batch."""
    net = torch.nn.parallel.DistributedDataParallel(make_net(), bucket_cap_mb=bucket_mb)
    net.register_comm_hook(None, gr.torch.comm_hook(exact(mesh)))
    return _train(net, number)


def fsdp(mesh: gr.Mesh, number: int) -> str:
    """Trains a module that FSDP2 shards; this process has one micro-batch."""
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    shards = dist.device_mesh.init_device_mesh("cpu", (mesh.num_processes,))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=shards)
        module.set_custom_reduce_scatter(gr.torch.ReduceScatter(exact(mesh)))
    return _train(net, number)


def _train(net: Any, number: int) -> str:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, number).backward()
        optimizer.step()
    return digest(net)


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    with gr.open_mesh(backend="sim", process_group=group, devices_per_process=1) as mesh:
        found = {"DataParallel": data_parallel(mesh, [range(rank, COUNT, size)])}
        for bucket_mb in (25, 2**-13):
            found[f"DDP {bucket_mb}"] = ddp(mesh, rank, bucket_mb)
        found["DDP, other ranks"] = ddp(mesh, size - 1 - rank, 25)
        found["FSDP2"] = fsdp(mesh, rank)
    for way, bits in found.items():
        print(f"exact sums: {way}: {bits}", flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
