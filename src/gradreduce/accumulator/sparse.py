"""The sparse conditional accumulator.

Source: tf.SparseConditionalAccumulator (conditional_accumulator.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import is_array, kind_of, numbers
from gradreduce.arrays.distributed import Mirrored, PerReplica, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices, as_slices
from gradreduce.arrays.types import OutputType, ReductionType
from gradreduce.arrays.variable import Variable
from gradreduce.backends.device_names import DeviceLike
from gradreduce.device import Mesh
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .base import ConditionalAccumulatorBase
from .create import create_state
from .multi import apply_grads, take_grads
from .sparse_storage import SPARSE
from .validate import DEFAULT_STEP


class SparseConditionalAccumulator(ConditionalAccumulatorBase):
    """Sums fresh sparse gradients, and returns their mean or sum once enough arrived.

    Rows of the same index are added: first within each gradient, in order, then gradient by
    gradient. Indices may be unsorted and may repeat. Memory is allocated for the rows that any
    gradient touched, at most twice as much. One launch adds a gradient, after a copy if the sum
    outgrows its memory, and one small upload transfers its indices; indices on a GPU are first
    downloaded, and the host waits for that.

    Args:
        dtype: of the values: float16, bfloat16, float32 or float64; 16-bit ones are summed in
            float32.
        shape: of the whole array, ``(rows, …)``; None or () for any, None entries for any extent.
            Gradients may have more dimensions.
        shared_name: if not empty, all accumulators of this name in the process share one state,
            until it is closed or the last of them is deleted.
        name: of the accumulator.
        reduction_type: ``"MEAN"``, which divides each row by the number of gradients that touched
            it, not by the number of all gradients, or ``"SUM"``.
        device: see ``ConditionalAccumulator``. Over a mesh, each device keeps a partial
            sum, and a take merges their rows on the first device, in mesh order.
        cross_device_ops: an ``AllReduceCrossDeviceOps``, whose mesh names devices. Rows are merged
            without it, on the first device.

    Raises:
        TypeError: the dtype is not supported, ``device`` is neither a device nor a mesh, or
            ``cross_device_ops`` is not a ``CrossDeviceOps``, or over a mesh not an
            ``AllReduceCrossDeviceOps``.
        ValueError: ``reduction_type`` is unknown, an extent is negative, the mesh does not have
            the device, or ``shared_name`` exists with other arguments.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: ReductionType = "MEAN",
        *,
        device: DeviceLike | Mesh | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        state = create_state(
            dtype, shape, shared_name, reduction_type, device, cross_device_ops, SPARSE
        )
        super().__init__(state, name)

    @StreamScope()
    def apply_grad(
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Sequence[int] | None = None,
        local_step: int | Variable = DEFAULT_STEP,
        name: str | None = None,
        *,
        cast: bool = False,
    ) -> bool:
        """Adds rows unless they are stale (``local_step`` below the accumulator's step).

        Args:
            grad_indices: the row number of each, ``(num_rows,)``: integers of any dtype, library
                and order. A gradient without rows counts too, and touches no row.
            grad_values: the rows, ``(num_rows, …)``: an array of any library, or a nested list.
                When this returns, work on its library's current stream may overwrite it. A host
                array goes to the device of the enclosing ``gr.replica``,
                else to the first.
            grad_shape: of the whole array, if known; -1 as its first entry if only that is unknown.
                That of the first gradient after a take bounds the indices of later ones, and is
                the shape of the result.
            local_step: the ``global_step`` with which they were computed; see
                ``ConditionalAccumulator.apply_grad``. A later one is not stale.
            name: ignored; TensorFlow's name of the operation.
            cast: convert values of another float dtype instead of raising ``ValueError``.

        Returns:
            True if they were added, False if dropped.

        Raises:
            InvalidArgumentError: (a ``ValueError``) the numbers of indices and rows differ, an
                index is negative or too large, or a shape does not fit the accumulator's or that
                of the gradients in the sum. Nothing was added.
            ValueError: the values have another dtype.
            TypeError: the indices are not integers.
            CancelledError: the accumulator was closed.
        """
        if kind_of(grad_values) == "native" and not is_array(grad_values):
            grad_values = numbers(grad_values, self.dtype)
        slices = IndexedSlices(grad_values, grad_indices, grad_shape)
        return apply_grads([self], [slices], local_step, cast=cast)

    def apply_indexed_slices_grad(
        self,
        grad: IndexedSlices | PerReplica | Any,
        local_step: int | Variable = DEFAULT_STEP,
        name: str | None = None,
        *,
        cast: bool = False,
    ) -> bool:
        """As ``apply_grad``, with indices and rows in one object.

        Args:
            grad: IndexedSlices, or a tensor of ``torch.sparse_coo`` with one sparse dimension; or a
                ``PerReplica`` of them, each of which counts as one gradient and is added on its
                own device.
            local_step: see ``apply_grad``.
            name: ignored; TensorFlow's name of the operation.
            cast: see ``apply_grad``.

        Raises:
            TypeError: ``grad`` is anything else.
            ValueError, CancelledError: as in ``apply_grad``.
        """
        return apply_grads([self], [grad], local_step, cast=cast)

    def take_grad(
        self,
        num_required: int | Variable,
        name: str | None = None,
        *,
        timeout: float | None = None,
        output_type: OutputType | None = None,
        deadline: float | None = None,
    ) -> tuple[Any, Any, Any]:
        """As ``take_indexed_slices_grad``, but returns indices, rows and shape.

        Args:
            num_required: see there.
            name: ignored; TensorFlow's name of the operation.
            timeout: see there.
            output_type: see there.
            deadline: see there.

        Returns:
            The indices, a NumPy array of int64, ascending; the rows, an array of the type of the
            first gradient, over a mesh a ``Mirrored``; and the shape of the whole array.
        """
        taken = as_slices(
            self.take_indexed_slices_grad(
                num_required, timeout=timeout, output_type=output_type, deadline=deadline
            )
        )
        if isinstance(taken, IndexedSlices):
            return taken.indices, taken.values, taken.dense_shape
        first = taken.parts[0]
        assert isinstance(first, IndexedSlices)
        rows = Mirrored.of([buffer_of(part) for part in taken.parts], taken.kind)
        return first.indices, rows, first.dense_shape

    def take_indexed_slices_grad(
        self,
        num_required: int | Variable,
        name: str | None = None,
        *,
        timeout: float | None = None,
        output_type: OutputType | None = None,
        deadline: float | None = None,
    ) -> IndexedSlices | Mirrored:
        """Blocks until the sum has ``num_required`` gradients; returns their mean or sum.

        All gradients in the sum are included. MEAN divides each row by the number of gradients that
        touched it. Takes complete in the order of the calls. Afterwards the sum is empty, and the
        step is one higher.

        Args:
            num_required: at least 1; an integer, or a Variable that holds one.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait for gradients; None waits without limit.
            output_type: the array type of the values. Default: that of the first gradient; see
                ``ConditionalAccumulator.take_grad``.
            deadline: see ``ConditionalAccumulator.take_grad``.

        Returns:
            IndexedSlices with every index once, ascending, on the accumulator's device; over a mesh
            a ``Mirrored`` of them; tensors of ``torch.sparse_coo`` if the first gradient was one.
            The caller owns them. The first entry of ``dense_shape`` is the accumulator's, else that
            of the first gradient, else -1.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1.
            DeadlineExceededError: the timeout expired; nothing was taken.
            CancelledError: the accumulator was closed, or the mesh failed while this waited.
            CollectiveError: the mesh has failed.
            ValueError: ``deadline`` is not a number above 0.
        """
        (taken,) = take_grads(
            [self], num_required, timeout=timeout, output_type=output_type, deadline=deadline
        )
        made: IndexedSlices | Mirrored = taken
        return made
