"""64 sequences of unequal length: the gradient is that of one batch in every layout."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
from pytorch.test_weighted import make_ddp
from support.libraries import torch
from support.sequences import NUM_SEQUENCES, by_fsdp, error, mean_loss, model, sequences
from support.thread_group import run_processes
from support.torch_layers import gradients, open_mesh

import gradreduce as gr

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
# Processes, devices of each, micro-batches of each device.
LAYOUTS = {"1 x 64": (1, 1, 64), "8 x 8": (1, 8, 8), "2 processes x 4 x 8": (2, 4, 8)}
ONE_PROCESS = {"1 x 64": (1, 1, 64), "8 x 8": (1, 8, 8), "4 x 16": (1, 4, 16)}
ONE_DEVICE = {"1 x 64": (1, 1, 64), "2 processes x 32": (2, 1, 32), "8 processes x 8": (8, 1, 8)}


@cache
def of_sequence(sequence):
    """The gradients of a sequence as arrays, and its weight."""
    net = model()
    loss, weight = mean_loss(net, sequence)
    loss.backward()
    return [each.numpy() for each in gradients(net)], weight


def by_sync_step(mesh, of_replicas):
    variables = [
        gr.Variable(np.zeros(each.shape, "f4"), f"{index}", device=mesh)
        for index, each in enumerate(model().parameters())
    ]
    step = gr.SyncStep(variables, gr.GradientDescentOptimizer(1.0), gr.NcclAllReduce(mesh=mesh))
    pairs = [[of_sequence(each) for each in row] for row in of_replicas]
    terms = [list(zip(*[found for found, _ in row], strict=True)) for row in pairs]
    step(terms, weights=[[weight for _, weight in row] for row in pairs])
    return [-each.numpy() for each in variables]


def by_accumulators(mesh, of_replicas):
    accumulators = [
        gr.ConditionalAccumulator("float32", tuple(each.shape), device=mesh)
        for each in model().parameters()
    ]
    for column in zip(*of_replicas, strict=True):
        pairs = [of_sequence(each) for each in column]
        weights = [weight for _, weight in pairs]
        rows = zip(*[found for found, _ in pairs], strict=True)
        for accumulator, row in zip(accumulators, rows, strict=True):
            accumulator.apply_grad(gr.PerReplica(list(row), mesh), 0, weight=weights)
    return [np.asarray(each.take_grad(NUM_SEQUENCES)[0]) for each in accumulators]


def by_data_parallel(mesh, of_replicas):
    dp = gr.torch.DataParallel(model(), mesh)
    for micro, column in enumerate(zip(*of_replicas, strict=True), 1):
        with nullcontext() if micro == len(of_replicas[0]) else dp.no_sync():
            for net, sequence in zip(dp.replicas, column, strict=True):
                loss, weight = mean_loss(net, sequence)
                with dp.weight(weight):
                    loss.backward()
    return gradients(dp.replicas[-1])


def by_ddp_hook(mesh, of_replicas):
    ddp = make_ddp(mesh, model)
    for micro, sequence in enumerate(*of_replicas, 1):
        with nullcontext() if micro == len(of_replicas[0]) else ddp.no_sync():
            gr.torch.weighted(*mean_loss(ddp, sequence), ddp).backward()
    return gradients(ddp)


def by_fsdp_alone(mesh, of_replicas):
    return by_fsdp(mesh, [[each] for each in of_replicas[0]])  # others: tests/comm/processes


CASES = [
    *[(way, name) for way in (by_sync_step, by_data_parallel) for name in LAYOUTS],
    *[(by_accumulators, name) for name in ONE_PROCESS],
    *[(by_ddp_hook, name) for name in ONE_DEVICE],
    (by_fsdp_alone, "1 x 64"),
]


@pytest.mark.parametrize(("way", "layout"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_the_gradient_is_that_of_one_batch(way, layout):
    processes, devices, micro_batches = (LAYOUTS | ONE_PROCESS | ONE_DEVICE)[layout]
    rows = np.arange(NUM_SEQUENCES).reshape(processes, devices, micro_batches)
    batch = sequences()

    def work(group):
        with open_mesh(devices, group) as mesh:
            own = rows[mesh.process_index]
            return way(mesh, [[batch[number] for number in row] for row in own])

    world = torch.distributed.group.WORLD
    for found in run_processes(processes, work) if processes > 1 else [work(world)]:
        assert error(found) <= 1e-6
