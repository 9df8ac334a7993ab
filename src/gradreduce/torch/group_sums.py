"""Sums over the processes of a ``torch.distributed`` group, by our pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from gradreduce.arrays.distributed import PerReplica, ReduceOp
from gradreduce.backends import open_group_mesh
from gradreduce.errors import CollectiveError
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

from .backend_options import BackendOptions

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALL_BYTES = 1 << 16  # up to here the host time of a call is longer than a copy
_MOST_STEPS = 64
_CLOSE_SECONDS = 5.0  # for processes that destroy the group later


def op_of(reduce_op: Any, tensors: Sequence[torch.Tensor]) -> ReduceOp | None:
    """Returns our name for a reduction; None if the inner group does it."""
    for tensor in tensors:
        is_dense = tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")
        if not is_dense or tensor.dtype not in _FLOATS or tensor.device != tensors[0].device:
            return None
    if reduce_op == dist.ReduceOp.SUM:
        return ReduceOp.SUM
    return ReduceOp.MEAN if reduce_op == dist.ReduceOp.AVG else None


class GroupSums:
    """Adds tensors of the processes of a group; used by one thread.

    Args:
        group: the inner group, with gloo or NCCL.
        options: see ``BackendOptions``.
        timeout: seconds, of the meshes.
    """

    def __init__(self, group: Any, options: BackendOptions, timeout: float) -> None:
        self._group = group
        self._options = options
        self._timeout = timeout
        self._ops: dict[torch.device, AllReduceCrossDeviceOps] = {}
        # Least recently used first. All processes make the same calls, so they agree in what is
        # prepared. None: it was called once.
        self._steps: OrderedDict[_SmallKind, _SmallStep | None] = OrderedDict()

    def _ops_for(self, device: torch.device) -> AllReduceCrossDeviceOps:
        """Returns the reductions on a device; the first call opens their mesh."""
        if device not in self._ops:
            gpu = device.index if device.type == "cuda" else None
            mesh = open_group_mesh(self._group, gpu, self._options.kernels, self._timeout)
            self._ops[device] = self._options.make_ops(mesh)
        return self._ops[device]

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, deadline: float | None
    ) -> None:
        """Replaces tensors on one device by their sums or means over the processes."""
        sums = [_flat(tensor) for tensor in tensors]
        ops = self._ops_for(tensors[0].device)
        if len(sums) == 1 and 0 < sums[0].nbytes <= _SMALL_BYTES:
            self._add_small(sums[0], op, deadline)
        else:
            ops.all_reduce([sums], op, out=[sums], deadline=deadline)
        for tensor, total in zip(tensors, sums, strict=True):
            _write(tensor, total)

    def _add_small(self, terms: torch.Tensor, op: ReduceOp, deadline: float | None) -> None:
        """Replaces a vector by its sum; from the second call on by a prepared step."""
        kind = (terms.device, terms.dtype, terms.numel(), op)
        ops = self._ops[terms.device]
        if kind not in self._steps:
            ops.all_reduce([[terms]], op, out=[[terms]], deadline=deadline)
            self._steps[kind] = None
            if len(self._steps) > _MOST_STEPS:
                self._steps.popitem(last=False)
            return
        self._steps.move_to_end(kind)
        step = self._steps[kind]
        if step is None:
            step = self._steps[kind] = _SmallStep(ops, terms, op, deadline)
        else:
            step.run(terms, deadline)
        _write(terms, step.memory)

    def reduce(self, tensor: torch.Tensor, op: ReduceOp, root: int, deadline: float | None) -> None:
        """Replaces a tensor by its sum or mean in the process ``root`` only."""
        total = tensor.detach().clone()
        self.all_reduce([total], op, deadline)
        if root == self._group.rank():
            _write(tensor, total)

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: ReduceOp,
        deadline: float | None,
    ) -> None:
        """Overwrites outputs with this process's shares of the sums or means of inputs.

        Args:
            outputs: tensors on one device.
            inputs: for each a tensor with as many elements for each process, in the order of ranks.
                An output may be a part of its input.
            op: SUM or MEAN.
            deadline: seconds.
        """
        terms = [_flat(tensor) for tensor in inputs]
        ops = self._ops_for(inputs[0].device)
        (shares,) = ops.reduce_scatter([terms], op, deadline=deadline)
        for output, share in zip(outputs, shares, strict=True):
            _write(output, share)

    def close(self) -> None:
        """Closes the meshes. Waits a few seconds for processes that have not come so far."""
        for ops in self._ops.values():
            assert ops.mesh is not None
            with suppress(CollectiveError):  # PyTorch's groups end without the other processes
                ops.mesh.close(deadline=min(self._timeout, _CLOSE_SECONDS))
        self._ops.clear()
        self._steps.clear()

    def abort(self) -> None:
        """Makes the call that runs, and all later ones, raise in all processes."""
        for ops in list(self._ops.values()):
            assert ops.mesh is not None
            ops.mesh.mesh_state.fail_all("its process group was aborted")


_SmallKind = tuple[torch.device, torch.dtype, int, ReduceOp]


class _SmallStep:
    """A prepared all-reduce of a vector, in memory of its own.

    The constructor runs it once.

    Attributes:
        memory: the vector: first the terms of this process, then the sums.
    """

    def __init__(
        self,
        cross_device_ops: AllReduceCrossDeviceOps,
        terms: torch.Tensor,
        op: ReduceOp,
        deadline: float | None,
    ) -> None:
        self.memory = terms.clone()
        value = PerReplica([self.memory], cross_device_ops.mesh)
        self._step = cross_device_ops.prepare(
            op, [(value, value)], out=[[self.memory]], deadline=deadline
        )

    def run(self, terms: torch.Tensor, deadline: float | None) -> None:
        """Adds other terms."""
        self.memory.copy_(terms)
        self._step(deadline=deadline)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as a vector: a view, or a copy if they are not in C order."""
    return tensor.detach().contiguous().view(-1)


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values to a tensor, unless they have its memory."""
    if values.data_ptr() != tensor.data_ptr():
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(values.view(tensor.shape))
