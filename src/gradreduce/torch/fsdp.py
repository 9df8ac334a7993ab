"""A reduce-scatter for FSDP2 (``fully_shard``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradreduce.arrays.distributed import ReduceOp
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

from .ddp_hook import validate_mesh
from .weighted import Period
from .weights import divide


class ReduceScatter:
    """Reduces and shards the gradients of FSDP2 by ``AllReduceCrossDeviceOps.reduce_scatter``.

    Pass it to each module that ``fully_shard`` was called with, before the first ``backward``::

        mesh = gr.open_mesh(process_group=dist.group.WORLD, devices_per_process=1)
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh, wire_dtype="bfloat16")
        for layer in sharded_layers:
            layer.set_custom_reduce_scatter(gr.torch.ReduceScatter(ops))

    If micro-batches have different numbers of examples, see ``weighted``.

    Example: see ``docs/pytorch.md``.

    Args:
        cross_device_ops: an ``AllReduceCrossDeviceOps`` over a mesh of the processes that shard the
            parameters, with one device in each process. Gradients are sent in its ``wire_dtype``.
            With ``exact=True`` those of the processes are added as real numbers.

    Attributes:
        mesh: the mesh of ``cross_device_ops``.

    Raises:
        TypeError, ValueError: see ``comm_hook``.
    """

    def __init__(self, cross_device_ops: AllReduceCrossDeviceOps) -> None:
        self.mesh = validate_mesh(cross_device_ops)
        self._cross_device_ops = cross_device_ops
        self._period = Period(self.mesh)

    def use_period(self, period: Period) -> None:
        """Uses the weights of a model; called by ``weighted``."""
        self._period = period

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns memory for gradients; called by FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces gradients; called by FSDP, on its stream.

        Args:
            output_tensor: overwritten with this process's share.
            input_tensor: the gradients, with the same number of elements for each process.
            group: the process group that shards them.
            op: PyTorch's ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
            async_op: no effect. On GPUs the work is queued; on the CPU it is done before the call
                returns.

        Raises:
            ValueError: ``group`` has another number of processes than the mesh, or ``op`` is
                neither SUM nor AVG, or SUM over several processes with weights.
        """
        if group.size() != self.mesh.num_processes:
            raise ValueError(
                f"FSDP shards over {group.size()} processes, but the mesh has "
                f"{self.mesh.num_processes}: pass FSDP's group to open_mesh(process_group=...)"
            )
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"op={op} is neither SUM nor AVG: do not set a gradient divide factor, or call "
                "set_force_sum_reduction_for_comms(True)"
            )
        divisor = self._period.divisor(lambda call: call())
        if self._period.is_weighted:
            if op == dist.ReduceOp.SUM and group.size() > 1:
                raise ValueError(
                    "FSDP divides a sum by the number of processes, not by weights: reduce in "
                    "float32 or bfloat16, without set_force_sum_reduction_for_comms(True)"
                )
            if not divisor.reads:
                input_tensor.fill_(-0.0 if self._cross_device_ops.exact else 0.0)
            op = dist.ReduceOp.AVG if divisor.total is None else dist.ReduceOp.SUM
        if divisor.error is not None:
            output_tensor.zero_()
            return
        kind = ReduceOp.MEAN if op == dist.ReduceOp.AVG else ReduceOp.SUM
        self._reduce(output_tensor, input_tensor, kind, divisor.total)

    def _reduce(
        self, out: torch.Tensor, gradients: torch.Tensor, op: ReduceOp, total: float | None
    ) -> None:
        """Reduces gradients, and divides by the sum of the weights, if there is one."""
        ops, share = self._cross_device_ops, out
        if total is not None and ops.exact and out.itemsize == 2:
            # A sum of 16 bits would be rounded before it is divided.
            gradients, share = gradients.float(), torch.empty_like(out, dtype=torch.float32)
        ops.reduce_scatter([[gradients]], op, out=[[share]])
        divide(share, total)
        if share is not out:
            out.copy_(share)
