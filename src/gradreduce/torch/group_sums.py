"""The collectives of a process group: sums by our pipeline, others by gloo or NCCL."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist

from gradreduce.arrays.distributed import PerReplica, ReduceOp
from gradreduce.backends import open_group_mesh
from gradreduce.comm.description import Description
from gradreduce.device import Mesh, MeshState
from gradreduce.errors import CollectiveError, InvalidArgumentError
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

from .backend_options import BackendOptions
from .group_calls import GroupCalls, GroupCollective

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALL_BYTES = 1 << 16  # up to here the host time of a call is longer than a copy
_MOST_STEPS = 64
_CLOSE_SECONDS = 5.0  # for processes that destroy the group later
_CPU = torch.device("cpu")
_FAILED = "gradreduce/failed"  # the key of the reason why a mesh was not opened


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
    """The collectives of a group, and the meshes that add; used by one thread.

    The mesh of the CPU is opened by the first collective. Its calls are the collectives.

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
        self._unopened = ""  # why no mesh was opened
        self._first: Description | None = None  # of the first collective

    def _ops_for(self, device: torch.device, deadline: float | None) -> AllReduceCrossDeviceOps:
        """Returns the reductions on a device; the first call opens their mesh."""
        if device not in self._ops:
            store = self._group.get_group_store()
            try:
                if store.check([_FAILED]):
                    raise CollectiveError(store.get(_FAILED).decode())
                mesh = self._open_mesh(device, self._rest(deadline))
            except CollectiveError as error:
                store.set(_FAILED, str(error))  # for processes that come later
                self._unopened = str(error)
                raise
            self._ops[device] = self._options.make_ops(mesh)
        return self._ops[device]

    def _open_mesh(self, device: torch.device, seconds: float) -> Mesh:
        processes, gpu = self._group, device.index
        if device.type == "cpu":
            processes, gpu = GroupCalls(self._group, seconds), None
        mesh = open_group_mesh(processes, gpu, self._options.kernels, seconds)
        mesh.mesh_state.processes.timeout = self._timeout
        return mesh

    def _rest(self, deadline: float | None) -> float:
        return self._timeout if deadline is None else min(deadline, self._timeout)

    # -- every collective -------------------------------------------------------------------------

    def begin(self, collective: GroupCollective, deadline: float | None) -> float | None:
        """Compares a collective with those of the other processes, before it runs.

        Args:
            collective: the collective.
            deadline: seconds; None: the timeout.

        Returns:
            What is left of the deadline.

        Raises:
            InvalidArgumentError, CollectiveError: another process makes another collective, or none
                in time. The group has failed.
        """
        end = time.monotonic() + (deadline or 0.0)
        self._first = self._first or collective.description
        mesh_state = self._mesh_state_of_calls(deadline)
        try:
            self._calls.begin(collective.description, self._rest(deadline))
        except (InvalidArgumentError, CollectiveError) as error:
            mesh_state.fail_all(str(error))
            raise
        if collective.is_on_gpu:  # nothing else posts the notice
            self._calls.post_kept()
        return None if deadline is None else max(1e-3, end - time.monotonic())

    def _mesh_state_of_calls(self, deadline: float | None) -> MeshState:
        mesh = self._ops_for(_CPU, deadline).mesh
        assert mesh is not None
        mesh.mesh_state.check_usable(mesh[0])
        return mesh.mesh_state

    def end(self) -> None:
        """Notes that the collective has ended without an error."""
        self._calls.end()

    @property
    def _calls(self) -> GroupCalls:
        mesh = self._ops[_CPU].mesh
        assert mesh is not None
        return cast(GroupCalls, mesh.mesh_state.processes)

    def run(self, start: Callable[[], Any], deadline: float | None, *, is_on_gpu: bool) -> Any:
        """Runs a collective of the inner group; returns its work.

        Args:
            start: starts it and returns its work.
            deadline: seconds, see ``begin``. On GPUs it has no effect.
            is_on_gpu: whether it is only queued, on the current stream.
        """
        if is_on_gpu:
            return start()
        mesh_state = self._mesh_state_of_calls(deadline)
        try:
            return self._calls.run(start, self._rest(deadline))
        except CollectiveError as error:
            mesh_state.fail(str(error))
            raise

    @property
    def failure(self) -> str | None:
        """Why the group has failed; None if it has not."""
        reasons = [each.reason for each in self._mesh_states()]
        return next((each for each in reasons if each is not None), self._unopened or None)

    def fail(self, reason: str) -> None:
        """Makes the call that runs, and all later ones, raise in all processes."""
        for mesh_state in self._mesh_states():
            if mesh_state.reason is None:
                mesh_state.fail_all(reason)

    def _mesh_states(self) -> list[MeshState]:
        meshes = [ops.mesh for ops in list(self._ops.values())]
        return [mesh.mesh_state for mesh in meshes if mesh is not None]

    def flight_record(self) -> dict[str, Any] | None:
        """Returns the last collectives; None before the first."""
        if _CPU in self._ops:
            return self._calls.flight_record()
        if self._first is None:
            return None
        digest, text = self._first
        return {
            "process": self._group.rank(),
            "calls": [{"number": 0, "digest": digest, "done": False}],
            "descriptions": {digest: json.loads(text)},
        }

    # -- sums -------------------------------------------------------------------------------------

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, deadline: float | None
    ) -> None:
        """Replaces tensors on one device by their sums or means over the processes."""
        sums = [_flat(tensor) for tensor in tensors]
        ops = self._ops_for(tensors[0].device, deadline)
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
        ops = self._ops_for(inputs[0].device, deadline)
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
