"""Short ways to an all-reduce; never reduces by itself.

Source: the presets of tf.distribute (NcclAllReduce, HierarchicalCopyAllReduce).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from gradreduce.cross_device import AllReduceCrossDeviceOps
from gradreduce.device import DType, FlatBuffer, Mesh
from gradreduce.errors import brief
from gradreduce.prepared import PreparedStep
from gradreduce.reduce_arguments import check_op
from gradreduce.values import PerReplica, ReduceOp

__all__ = ["HierarchicalCopyAllReduce", "NcclAllReduce", "all_reduce", "shared_ops"]


class NcclAllReduce(AllReduceCrossDeviceOps):
    """``AllReduceCrossDeviceOps`` by NCCL, with ``num_packs`` packs (at least 0)."""

    def __init__(
        self,
        num_packs: int = 1,
        *,
        mesh: Mesh | None = None,
        wire_dtype: str | DType | None = None,
    ) -> None:
        super().__init__("nccl", num_packs, mesh=mesh, wire_dtype=wire_dtype)


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """``AllReduceCrossDeviceOps`` by hierarchical copy, with ``num_packs`` packs (at least 0).

    ``topology``, two lists of replica numbers, names other halves than the first n // 2 replicas
    and the rest; see ``AllReduceCrossDeviceOps``.
    """

    def __init__(
        self,
        num_packs: int = 1,
        *,
        mesh: Mesh | None = None,
        topology: Sequence[Sequence[int]] | None = None,
        wire_dtype: str | DType | None = None,
    ) -> None:
        super().__init__(
            "hierarchical_copy", num_packs, mesh=mesh, topology=topology, wire_dtype=wire_dtype
        )


@cache
def shared_ops() -> AllReduceCrossDeviceOps:
    """The one that those use who were given none; what shares it can travel together."""
    return AllReduceCrossDeviceOps()


def all_reduce(  # noqa: PLR0913  # what is asked in one line
    grads: Sequence[Any],
    op: ReduceOp = ReduceOp.MEAN,
    *,
    mesh: Mesh | None = None,
    coalesce: bool = False,
    as_kind: str | None = None,
    out: Sequence[Any] | None = None,
    wire_dtype: str | DType | None = None,
    deadline: float | None = None,
) -> Any:
    """``AllReduceCrossDeviceOps(mesh=mesh).all_reduce(grads, op)``, in one line.

    Args:
        grads: ``grads[device][tensor]``, lists, tuples or dicts of arrays or IndexedSlices. A
            tensor that is None on every device stays None.
        op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``.
        mesh: whose devices. Default: ``gr.default_mesh()``.
        coalesce: add rows of the same index of IndexedSlices.
        as_kind: what the results are instead of the kind of each tensor's first array.
        out: arrays that the results are written into, nested as ``grads``.
        wire_dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``: in which dtype floats travel;
            see ``AllReduceCrossDeviceOps``.
        deadline: seconds from now in which the devices must be done, or the mesh dies.

    Returns:
        The combined arrays, nested as they came. New memory; or ``out``.

    Raises:
        ValueError, TypeError, BackendUnavailableError, CollectiveError: what
            ``AllReduceCrossDeviceOps.all_reduce`` raises.
    """
    check_op("op", op)
    ops_of_mesh = AllReduceCrossDeviceOps(mesh=mesh, wire_dtype=wire_dtype)
    return ops_of_mesh.all_reduce(
        grads, op, coalesce=coalesce, as_kind=as_kind, out=out, deadline=deadline
    )


def _prepare_step(
    flat: FlatBuffer, op: ReduceOp, cross_device_ops: Any, deadline: float | None
) -> PreparedStep:
    """See ``FlatBuffer.prepare_all_reduce``."""
    ops = shared_ops() if cross_device_ops is None else cross_device_ops
    if not isinstance(ops, AllReduceCrossDeviceOps):
        raise ValueError(
            f"cross_device_ops={brief(ops)} cannot prepare a step: pass an AllReduceCrossDeviceOps"
        )
    columns = list(zip(*flat.views, strict=True))
    values = [PerReplica.of(column) for column in columns]
    flat.adopt()
    step = ops.prepare(op, [(value, value) for value in values], out=columns, deadline=deadline)
    step.flat = flat
    flat.release(deadline=deadline)
    return step


FlatBuffer.prepare_step = staticmethod(_prepare_step)
