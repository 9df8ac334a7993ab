"""A communication hook for ``DistributedDataParallel`` that reduces its buckets."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradreduce.arrays.distributed import PerReplica, ReduceOp
from gradreduce.device import as_deadline
from gradreduce.errors import brief, listed
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.reduce.prepared import PreparedStep

from .weighted import Period
from .weights import StepDivisor, divide
from .worker import with_name, worker_of

_Known = dict[tuple[int, ReduceOp], tuple[tuple[object, ...], PreparedStep | None]]
Hook = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def comm_hook(cross_device_ops: AllReduceCrossDeviceOps, *, deadline: float | None = None) -> Hook:
    """Returns a communication hook that averages DDP's buckets by ``cross_device_ops``.

    Register it in every process, before the first ``backward``::

        mesh = gr.open_mesh(process_group=dist.group.WORLD, devices_per_process=1)
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, wire_dtype="bfloat16")
        ddp.register_comm_hook(None, gr.torch.comm_hook(ops))

    The hook does not wait. A thread reduces one bucket after the other, in place, while
    ``backward`` computes the next gradients. ``backward`` returns when all buckets are averaged. If
    a reduction fails, ``backward`` raises the error, whose message names the bucket and its
    parameters. The mesh has failed then, and the gradients are undefined. ``docs/pytorch.md``
    says what else of DDP works with the hook.

    If micro-batches have different numbers of examples, see ``weighted``.

    Example: see ``examples/ddp_hook.py``.

    Args:
        cross_device_ops: an ``AllReduceCrossDeviceOps`` over a mesh of the processes in DDP's
            process group, with one device in each process. Gradients are sent in its
            ``wire_dtype``. With ``exact=True`` the gradients of the processes are added as real
            numbers, for any buckets; PyTorch adds those of micro-batches inside ``no_sync`` before.
        deadline: seconds for the reduction of a bucket, counted from its start; the wait for the
            previous bucket does not count. Default: the ``timeout`` of the mesh.

    Returns:
        The hook, for one DDP module.

    Raises:
        TypeError: ``cross_device_ops`` is not an ``AllReduceCrossDeviceOps``.
        ValueError: ``cross_device_ops`` has no mesh, or its mesh has several devices in this
            process or does not contain the other processes; or ``deadline`` is not a number above
            0.
    """
    seconds = as_deadline(deadline)
    mesh = validate_mesh(cross_device_ops)
    worker = worker_of(mesh)
    period = Period(mesh)
    # For each bucket and op the memory that it had in the last backward, and its prepared step.
    known: _Known = {}

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        mesh.mesh_state.check_process()
        if not isinstance(bucket, dist.GradBucket):
            raise RuntimeError(
                "comm_hook averages DDP's buckets, but DDP's python_reducer passes parameters: set "
                "torch._dynamo.config.optimize_ddp to another reducer, before DDP is made"
            )
        gradients = bucket.buffer()
        on_gpu = [gradients.device] if gradients.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=on_gpu)
        index, parameters = bucket.index(), bucket.parameters()
        divisor = period.divisor(lambda call: worker.submit(call, ()))

        def reduce() -> None:
            try:
                mean = _mean_of(index, gradients, cross_device_ops, seconds, known, divisor)
                future.set_result(mean)
            except Exception as error:
                named = with_name(error, f"bucket {index} ({listed(_names_of(parameters))})")
                future.set_exception(named)
                raise named from error.__cause__

        task = worker.submit(reduce, map(torch.cuda.current_stream, on_gpu))
        if torch._C._current_graph_task_id() < 0:  # DDP's join() calls the hook outside a backward
            task.wait()
            return future
        # Called at the end of backward, before DDP's own callback, which would replace an error by
        # "Unable to cast … to Tensor".
        torch.autograd.Variable._execution_engine.queue_callback(task.wait)
        return future

    hook.period = period  # type: ignore[attr-defined]
    return hook


def validate_mesh(cross_device_ops: Any) -> Any:
    """Returns the mesh of ``cross_device_ops``, which must have one device in each process."""
    if not isinstance(cross_device_ops, AllReduceCrossDeviceOps):
        raise TypeError(
            f"cross_device_ops={brief(cross_device_ops)} is not an AllReduceCrossDeviceOps"
        )
    mesh = cross_device_ops.mesh
    how = "open it by gr.open_mesh(process_group=..., devices_per_process=1)"
    if mesh is None:
        raise ValueError(f"{cross_device_ops!r} has no mesh: pass mesh=, and {how}")
    if len(mesh.devices) != 1:
        raise ValueError(
            f"{mesh!r} has {len(mesh.devices)} devices in this process; DDP and FSDP have one "
            f"in each: {how}"
        )
    if mesh.num_processes == 1 and dist.get_world_size() > 1:
        raise ValueError(f"{mesh!r} has one of {dist.get_world_size()} processes only: {how}")
    return mesh


def _mean_of(
    index: int,
    gradients: torch.Tensor,
    cross_device_ops: AllReduceCrossDeviceOps,
    deadline: float | None,
    known: _Known,
    divisor: StepDivisor,
) -> torch.Tensor:
    """Averages a bucket over the processes, in place unless gradients are sparse; returns the mean.

    A bucket that has the same memory as in the previous backward gets a prepared step.

    Args:
        index: the number of the bucket.
        gradients: the bucket.
        cross_device_ops: see ``comm_hook``.
        deadline: seconds for the reduction.
        known: for each bucket and op the memory that it had in the last backward, and its prepared
            step.
        divisor: the sum of the weights; if it has an error, nothing is reduced.
    """
    if divisor.error is not None:
        return gradients
    if not divisor.reads:
        gradients.fill_(-0.0 if cross_device_ops.exact else 0.0)
    op = ReduceOp.MEAN if divisor.total is None else ReduceOp.SUM
    if gradients.is_sparse:
        ((mean,),) = cross_device_ops.all_reduce([[gradients]], op, deadline=deadline)
        divide(mean._values(), divisor.total)
        return mean
    if divisor.total is not None and cross_device_ops.exact and gradients.itemsize == 2:
        sums = gradients.float()  # a sum of 16 bits would be rounded before it is divided
        cross_device_ops.all_reduce([[sums]], op, out=[[sums]], deadline=deadline)
        divide(sums, divisor.total)
        return gradients.copy_(sums)
    out = [[gradients]]
    place = (gradients.data_ptr(), gradients.shape, gradients.dtype)
    before, step = known.get((index, op), (None, None))
    if before != place:  # DDP makes new buckets after the first backward
        known[index, op] = place, None
        cross_device_ops.all_reduce(out, op, out=out, deadline=deadline)
    elif step is not None:
        step(deadline=deadline)
    else:
        value = PerReplica([gradients], cross_device_ops.mesh, name=f"bucket {index}")
        step = cross_device_ops.prepare(op, [(value, value)], out=out, deadline=deadline)
        known[index, op] = place, step
    divide(gradients, divisor.total)
    return gradients


def _names_of(parameters: Sequence[torch.Tensor]) -> list[str]:
    """Returns the names of parameters; searches for their DDP module, which buckets lack."""
    names = {id(parameter): f"a parameter {list(parameter.shape)}" for parameter in parameters}
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):
            for name, parameter in found.module.named_parameters():
                if id(parameter) in names:
                    names[id(parameter)] = name
    return list(names.values())
