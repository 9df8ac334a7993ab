"""Layers of PyTorch with exact gradients, and loops that train them in a DataParallel."""

from support.libraries import torch
from support.thread_group import run_processes

import gradreduce as gr

TINY_MB = 2**-20 * 100  # a bucket of 12 float64: a layer


def layers(count=4, size=3):
    """Linear layers with integers, so that all gradients are exact; equal at each call."""
    net = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(count)]).double()
    for number, parameter in enumerate(net.parameters()):
        torch.nn.init.constant_(parameter, 1.0 + number % 2)
    return net


def batch(replica, step=0, size=3):
    return torch.full((2, size), 1.0 + replica + 3 * step, dtype=torch.float64)


def open_mesh(devices, group=None):
    return gr.open_mesh(devices, backend="sim", process_group=group)


def in_processes(processes, work, make=layers, devices=1, *, exact=False, **options):
    """Calls ``work(dp, mesh)`` with a DataParallel in each process; returns the results."""

    def run(group):
        with open_mesh(devices, group) as mesh:
            more = {"ops": gr.AllReduceCrossDeviceOps(mesh=mesh, exact=True)} if exact else {}
            return work(gr.torch.DataParallel(make(), mesh, **options, **more), mesh)

    return run_processes(processes, run) if processes > 1 else [run(None)]


def gradients(module):
    return [None if each.grad is None else each.grad.clone() for each in module.parameters()]


def means(rows):
    """The means of the gradients, with zeros for a replica without; None if no replica has one."""
    made = []
    for column in zip(*rows, strict=True):
        like = next((each for each in column if each is not None), None)
        terms = [0.0 if each is None else each for each in column]
        made.append(None if like is None else torch.as_tensor(sum(terms) / len(terms)))
    return made


def means_of(num_replicas, step=0):
    """The means of the gradients of ``layers`` in this step of ``trained``."""
    rows = []
    for replica in range(num_replicas):
        net = layers()
        plain(net, batch(replica, step)).backward()
        rows.append(gradients(net))
    return means(rows)


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert torch.equal(one, other), (one, other)


def plain(net, x, *_):
    return net(x).sum()


def frozen(net):
    net[1].requires_grad_(False)
    return net


def trained(dp, run, first, begin, steps=3):
    """Computes gradients as training loops do; returns those of all replicas."""
    found = []
    for step in range(steps):
        begin(dp, step)
        losses = []
        for index, replica in enumerate(dp.replicas):
            losses.append(run(replica, batch(first + index, step), first + index, step))
            if step == 1:
                losses.pop().backward()
        if losses:
            torch.stack(losses).sum().backward()
        found.append([gradients(replica) for replica in dp.replicas])
    return found


def zero(dp, step):
    """Zeroes the gradients in one of three ways."""
    if step == 1:
        dp.zero_grad()
    else:
        for parameter in dp.parameters():
            parameter.grad = None


def autocast(net, x, *_):
    with torch.autocast("cpu", torch.bfloat16):
        return net(x.float()).sum()


def fully_sharded(mesh, net=None):
    """A root whose layers and itself are sharded over the processes of the mesh."""
    from torch.distributed.fsdp import fully_shard

    net = net or layers()
    shards = torch.distributed.device_mesh.init_device_mesh("cpu", (mesh.num_processes,))
    for module in (*net, net):
        fully_shard(module, mesh=shards)
        scatter = gr.torch.ReduceScatter(gr.AllReduceCrossDeviceOps(mesh=mesh))
        module.set_custom_reduce_scatter(scatter)
    return net
