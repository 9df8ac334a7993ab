"""Trains by gr.torch.DataParallel and the hook of DDP on one GPU; compares all gradients exactly.

Trains first in one process with two logical devices of the GPU, then in two processes, which share
the GPU and reduce through host memory (gloo). Backward runs on a side stream, after slow work, so
that code that does not wait for it reads old gradients. Between two steps PyTorch's caching
allocator reuses the memory of the gradients for other tensors.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from measure.in_processes import figures_of_each
from torch import nn

import gradreduce as gr
from gradreduce.backends import BackendName
from gradreduce.device import Mesh

from .setting import python

NUM_PROCESSES, STEPS, WIDTH, BUCKET_MB = 2, 6, 64, 0.05  # a bucket for each layer
SLEEP_CYCLES = 50_000_000  # tens of milliseconds
SECONDS = 40.0  # for both processes


def layers(device: str) -> Any:
    """Returns layers of small integers, so that every sum is exact."""
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]).double()
    for number, parameter in enumerate(net.parameters()):
        nn.init.constant_(parameter, 1.0 + number)
    return net.to(device)


def batch(replica: int, step: int, device: str = "cpu") -> Any:
    """Returns the inputs of a replica, integers too."""
    rows = torch.arange(4 * WIDTH, dtype=torch.float64) % 5
    return (rows.reshape(4, WIDTH) + replica + step).to(device)


def means(step: int) -> list[Any]:
    """Returns the means of the gradients of two replicas, computed on the CPU."""
    nets = [layers("cpu") for _ in range(2)]
    for replica, net in enumerate(nets):
        net(batch(replica, step)).sum().backward()
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    return [(one.grad + other.grad) / 2 for one, other in pairs]


@contextmanager
def side_stream(device: str) -> Iterator[None]:
    """Context manager: on a GPU work goes to another stream, after slow work."""
    if device == "cpu":
        yield
        return
    outer, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(outer)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        yield
    outer.wait_stream(side)


def run_steps(modules: Sequence[Any], first: int, zero: Any, device: str) -> int:
    """Computes gradients of each module, and compares them; returns how many were compared.

    There is a module for each replica of this process, from number ``first`` on. ``zero`` zeroes
    all gradients, or drops them where it is called with True.
    """
    compared = 0
    for step in range(STEPS):
        zero(step % 2 == 0)
        # What was free is NaN now.
        other = [torch.full_like(each, torch.nan) for each in modules[0].parameters()]
        del other
        with side_stream(device):
            losses = [
                module(batch(first + index, step, device)).sum()
                for index, module in enumerate(modules)
            ]
            torch.stack(losses).sum().backward()
        for module in modules:
            for parameter, wanted in zip(module.parameters(), means(step), strict=True):
                if not torch.equal(parameter.grad.cpu(), wanted):
                    raise AssertionError(f"step {step}: {parameter.grad} is not {wanted}")
                compared += 1
    return compared


def data_parallel(mesh: Mesh, first: int, device: str) -> int:
    replicas = [layers(device) for _ in mesh]
    dp = gr.torch.DataParallel(replicas, mesh, bucket_mb=BUCKET_MB)
    return run_steps(replicas, first, dp.zero_grad, device)


def in_one_process(backend: BackendName, device: str) -> int:
    with gr.open_mesh([0, 0], backend=backend) as mesh:
        return data_parallel(mesh, 0, device)


def one_of_two(backend: BackendName, device: str, rank: int, store: str) -> int:
    """Tests one process of two, also by the hook of DDP."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NUM_PROCESSES)
    with gr.open_mesh([0], backend=backend, process_group=dist.group.WORLD) as mesh:
        compared = data_parallel(mesh, rank, device)
        ddp = nn.parallel.DistributedDataParallel(layers(device), bucket_cap_mb=BUCKET_MB)
        ddp.register_comm_hook(None, gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh)))
        compared += run_steps([ddp], rank, ddp.zero_grad, device)
    dist.destroy_process_group()
    return compared


def in_two_processes(backend: BackendName, device: str) -> int:
    """Tests two processes; returns how many gradients were compared."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [(backend, device, rank, f"{folder}/store") for rank in range(NUM_PROCESSES)]
        of = "gpu_check.torch_training:one_of_two"
        found = figures_of_each(of, ranks, python(fake=False), SECONDS, [{}] * NUM_PROCESSES)
    return sum(found)


def trained(quick: bool) -> dict[str, int]:
    return {"compared": in_one_process("cuda", "cuda") + in_two_processes("cuda", "cuda")}
