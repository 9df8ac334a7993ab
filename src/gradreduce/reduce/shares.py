"""Reduce-scatter and all-gather of checked requests, by rows of their tensors."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.arrays.distributed import ReduceOp
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer

from .algorithms import Settings
from .arguments import Request, batches_of
from .pipeline import plan_requests, reduce_batch
from .weighting import Weighting


def reduce_scatter(
    settings: Settings,
    reduce_op: ReduceOp,
    requests: Sequence[Request],
    weighting: Weighting | None = None,
) -> list[tuple[Buffer, ...]]:
    """Reduces checked requests; each replica of this process gets its rows of each result.

    Args:
        settings: the settings of the reduction.
        reduce_op: see ``AllReduceCrossDeviceOps.reduce_scatter``.
        requests: dense values on the devices of a mesh; their number of rows is a multiple of the
            number of replicas.
        weighting: the weights of the replicas; None: all are 1.
    """
    results: list[tuple[Buffer, ...]] = [()] * len(requests)
    batches = batches_of(requests, reduce_op)[0]
    planned = [
        plan_requests(
            settings,
            reduce_op,
            requests,
            *batch,
            call="reduce-scatter",
            is_weighted=weighting is not None,
        )
        for batch in batches
    ]  # before the first launch, because each compiles its kernels
    for (indices, _), (gradients, plan) in zip(batches, planned, strict=True):
        num_replicas = Replicas.of(gradients[0]).count
        rows = [
            [_rows_of(buffer, owner, num_replicas) for buffer in replicas]
            for owner in range(num_replicas)
            for replicas in gradients
        ]
        by = {} if weighting is None else weighting.arguments
        made = reduce_batch(plan, rows, positions=indices, **by)
        found = [share for of_row in made for share in of_row]  # of this process's replicas
        for position, index in enumerate(indices):
            results[index] = tuple(found[position :: len(indices)])
    return results


def all_gather(settings: Settings, requests: Sequence[Request]) -> list[tuple[Buffer, ...]]:
    """Concatenates the replicas of checked requests on every device of this process.

    Args:
        settings: the settings of the transfer.
        requests: dense values on the devices of a mesh, not scalars.
    """
    if not requests:
        return []
    positions = range(len(requests))
    values, plan = plan_requests(
        settings, ReduceOp.SUM, requests, positions, False, call="all-gather"
    )
    replicas = Replicas.of(values[0])
    num_replicas, first = replicas.count, replicas.first
    results = [
        request.out
        or tuple(
            [
                part.device.empty((num_replicas * part.shape[0], *part.shape[1:]), part.dtype)
                for part in parts
            ]
        )
        for request, parts in zip(requests, values, strict=True)
    ]
    tensors = [
        parts[owner - first : owner - first + 1] if owner >= first else ()
        for owner in range(num_replicas)
        for parts in values
    ]
    out = [
        [_rows_of(whole, owner, num_replicas) for whole in wholes]
        for owner in range(num_replicas)
        for wholes in results
    ]
    reduce_batch(plan, tensors, out=out, positions=positions)
    return results


def _rows_of(whole: Buffer, owner: int, num_replicas: int) -> Buffer:
    """Returns the rows of a replica."""
    shape, size = (whole.shape[0] // num_replicas, *whole.shape[1:]), whole.size // num_replicas
    (part,) = whole.parts([owner * size], [size], [shape])
    return part
