"""Presets of AllReduceCrossDeviceOps, and an all-reduce in one call.

Sources: the presets of tf.distribute (NcclAllReduce, HierarchicalCopyAllReduce).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, overload

from gradreduce.arrays.distributed import ReduceOp
from gradreduce.arrays.types import NestT, OutputType
from gradreduce.device import DType, Mesh
from gradreduce.ops import NUM_WORDS

from .algorithm import ProcessesName
from .all_reduce_ops import AllReduceCrossDeviceOps


class NcclAllReduce(AllReduceCrossDeviceOps):
    """``AllReduceCrossDeviceOps`` by NCCL, with ``num_packs`` packs (at least 0).

    Example:
        >>> gr.NcclAllReduce(num_packs=2).all_reduce_alg
        'nccl'
    """

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

    ``reduction_groups`` (lists of replica numbers, or ``"processes"``) replaces the default groups,
    which are the first n // 2 replicas and the rest. ``exact`` adds the terms as real numbers,
    ``words`` has an effect only with several processes. See ``AllReduceCrossDeviceOps``.

    Example:
        >>> gr.HierarchicalCopyAllReduce(reduction_groups=[[0, 1], [2, 3]]).reduction_groups
        ((0, 1), (2, 3))
    """

    def __init__(
        self,
        num_packs: int = 1,
        *,
        mesh: Mesh | None = None,
        reduction_groups: Sequence[Sequence[int]] | ProcessesName | None = None,
        wire_dtype: str | DType | None = None,
        exact: bool = False,
        words: int = NUM_WORDS,
    ) -> None:
        super().__init__(
            "hierarchical_copy",
            num_packs,
            mesh=mesh,
            reduction_groups=reduction_groups,
            wire_dtype=wire_dtype,
            exact=exact,
            words=words,
        )


@cache
def default_ops(*, exact: bool = False) -> AllReduceCrossDeviceOps:
    """Returns the shared default instance; gradients reduced by it can share packs."""
    return AllReduceCrossDeviceOps(exact=exact)


@overload
def all_reduce(
    grads: NestT,
    op: ReduceOp = ReduceOp.MEAN,
    *,
    mesh: Mesh | None = None,
    coalesce: bool = False,
    wire_dtype: str | DType | None = None,
    weights: Sequence[float] | None = None,
    exact: bool = False,
    words: int = NUM_WORDS,
    deadline: float | None = None,
) -> NestT: ...
@overload
def all_reduce(
    grads: Sequence[Any],
    op: ReduceOp = ReduceOp.MEAN,
    *,
    mesh: Mesh | None = None,
    coalesce: bool = False,
    output_type: OutputType | None = None,
    out: Sequence[Any] | None = None,
    wire_dtype: str | DType | None = None,
    weights: Sequence[float] | None = None,
    exact: bool = False,
    words: int = NUM_WORDS,
    deadline: float | None = None,
) -> Any: ...
def all_reduce(  # noqa: PLR0913  # the options of a one-line call
    grads: Sequence[Any],
    op: ReduceOp = ReduceOp.MEAN,
    *,
    mesh: Mesh | None = None,
    coalesce: bool = False,
    output_type: OutputType | None = None,
    out: Sequence[Any] | None = None,
    wire_dtype: str | DType | None = None,
    weights: Sequence[float] | None = None,
    exact: bool = False,
    words: int = NUM_WORDS,
    deadline: float | None = None,
) -> Any:
    """Combines ``grads[device][tensor]`` over the devices of a mesh, in one call.

    The same as ``AllReduceCrossDeviceOps(mesh=mesh).all_reduce(grads, op)``.

    Args:
        grads: ``grads[device][tensor]``: for each device a list, tuple or dict of arrays or
            IndexedSlices, which may be nested, or a PyTorch module. A tensor that is None on every
            device stays None.
        op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``.
        mesh: the mesh of the devices. Default: ``gr.default_mesh()``.
        coalesce: add rows of IndexedSlices that have the same index.
        output_type: the kind of the results: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or
            ``"buffer"``. Default: the kind of each tensor's first array.
        out: arrays to write the results into, nested like ``grads``.
        wire_dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``: the dtype in which floats are
            transferred; see ``AllReduceCrossDeviceOps``.
        weights: for each device of the mesh the weight of its gradients, such as the number of
            examples in its batch. MEAN is the sum of weight times gradient divided by the sum of
            all weights. Gradients with weight 0 are not read. Default: all weights are 1.
        exact: add the terms as real numbers and round their sum once, so that neither their order
            nor their number changes a bit; see ``AllReduceCrossDeviceOps`` and docs/same_bits.md.
        words: see ``AllReduceCrossDeviceOps``.
        deadline: seconds from now; if the devices take longer, the mesh fails.

    Returns:
        The combined arrays, nested like ``grads``: in new memory, or ``out``.

    Raises:
        ValueError, TypeError, BackendUnavailableError, CollectiveError: what
            ``AllReduceCrossDeviceOps.all_reduce`` raises.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> gr.all_reduce([[np.array([1.0, 2.0])], [np.array([3.0, 6.0])]], mesh=mesh)
        [[array([2., 4.])], [array([2., 4.])]]
        >>> gr.all_reduce([[np.array([1.0])], [np.array([5.0])]], mesh=mesh, weights=[3, 1])[0]
        [array([2.])]
    """
    ops = AllReduceCrossDeviceOps(mesh=mesh, wire_dtype=wire_dtype, exact=exact, words=words)
    return ops.all_reduce(
        grads, op, coalesce=coalesce, output_type=output_type, out=out, weights=weights,
        deadline=deadline,
    )  # fmt: skip
