"""Two processes train; a hook of a parameter of process 1 fails in the third ``backward``.

``failing_backward.py KIND RUNS``. Each run is forked, because importing PyTorch takes seconds, and
ends like a script that raises. The program prints the exit statuses of both processes.
"""

import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradreduce as gr

BUCKET_MB = 2**-9


def main(kind: str, runs: int) -> None:
    for _ in range(runs):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = {}
        for rank in range(2):
            processes[rank] = os.fork()
            if processes[rank] == 0:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                return train(kind, rank)
        ends = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in processes.values()]
        print("statuses", *ends, flush=True)


def train(kind: str, rank: int) -> None:
    step = 0

    def fail(gradient: torch.Tensor) -> None:
        if rank == 1 and step == 2:
            raise ValueError("of the user's hook")

    dist.init_process_group("gloo")
    net = torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(8)])
    net[3].weight.register_hook(fail)
    mesh = gr.open_mesh(backend="sim", process_group=dist.group.WORLD, devices_per_process=1)
    model = wrapped(kind, net, mesh)
    for step in range(5):  # noqa: B007  # read by the hook
        model.zero_grad()
        model(torch.ones(4, 30)).sum().backward()


def wrapped(kind: str, net: Any, mesh: Any) -> Any:
    if kind == "DataParallel":
        return gr.torch.DataParallel(net, mesh, bucket_mb=BUCKET_MB)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    ddp = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    ddp.register_comm_hook(None, gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh)))
    return ddp


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
