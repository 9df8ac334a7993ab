"""How arrivals of one sparse gradient over time become one: the public sparse accumulator.

Source: tf.SparseConditionalAccumulator (conditional_accumulator.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import is_array, kind_of, numbers
from gradreduce.arrays.distributed import Mirrored, PerReplica, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices, as_slices
from gradreduce.arrays.variable import Variable
from gradreduce.backends.device_names import DeviceLike
from gradreduce.device import Mesh
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .base import ConditionalAccumulatorBase
from .create import defined
from .multi import apply_grads, take_grads
from .validate import DEFAULT_STEP

__all__ = ["SparseConditionalAccumulator"]


class SparseConditionalAccumulator(ConditionalAccumulatorBase):
    """Adds sparse gradients that are not stale, and hands out their mean when enough have come.

    Rows of the same index are added: those of one gradient first, in the order in which they came,
    then those of one gradient after the other. Indices may be unsorted and may repeat. Memory is
    held for the rows that any gradient touched, and for less than as many again. One launch adds a
    gradient, behind a copy where the sum outgrows its memory, and one small upload brings its
    indices; indices on a GPU are first brought to the host, which waits.

    Args:
        dtype: of the values: float16, bfloat16, float32 or float64; halves are summed in float32.
        shape: of the whole array, ``(rows, …)``; None or () for any, None entries for any extent.
            Gradients may have more dimensions.
        shared_name: if not empty, all accumulators of this name in the process are one, as long
            as a handle of it is held and until it is closed.
        name: of the accumulator.
        reduction_type: ``"MEAN"``, which divides each row by the number of gradients that touched
            it, not by the number that came, or ``"SUM"``.
        device: see ``ConditionalAccumulator``. Over a mesh a partial sum is kept on each of its
            devices, and their rows are merged once, at the take, in mesh order, on the first
            device.
        cross_device_ops: any ``CrossDeviceOps``; see ``ConditionalAccumulator``. An
            ``AllReduceCrossDeviceOps`` merges rows on the first device, as is done without one;
            ``ReductionToOneDevice`` on its own. What comes is put into the order of the indices.

    Raises:
        TypeError: another dtype, ``device`` is neither a device nor a mesh, or
            ``cross_device_ops`` is of another class.
        ValueError: an unknown ``reduction_type``, a negative extent, a device that the mesh has
            not, or another definition of the same ``shared_name``.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        device: DeviceLike | Mesh | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        state = defined(
            dtype, shape, shared_name, reduction_type, device,
            cross_device_ops=cross_device_ops, sparse=True,
        )  # fmt: skip
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
        """Adds rows, unless they are stale: ``local_step`` less than the accumulator's step.

        Args:
            grad_indices: the row number of each, ``(num_rows,)``: integers of any dtype, library
                and order. No row at all is a gradient too: it counts, and touches nothing.
            grad_values: the rows, ``(num_rows, …)``: an array of any library, or a nested list.
                Not written, not kept: when this returns its library's current stream may
                overwrite it. A host array goes to the device of the enclosing ``gr.replica``,
                else to the first.
            grad_shape: of the whole array, if known; -1 as its first entry if only that is not.
                That of the first gradient after a take is remembered: it bounds the indices of
                later ones, and the take has it.
            local_step: the step at which they were computed; see
                ``ConditionalAccumulator.apply_grad``. A later one is not stale.
            name: ignored; TensorFlow's name of the operation.
            cast: convert values of another float dtype instead of refusing them.

        Returns:
            True if they were added, False if dropped.

        Raises:
            InvalidArgumentError: (a ``ValueError``) indices are not one for each row, one is
                negative or too large, or a shape does not fit the accumulator's, or that of the
                gradients in the sum. Nothing was added.
            ValueError: values of another dtype.
            TypeError: indices that are no integers.
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
        """As ``apply_grad``, with the rows in one object.

        Args:
            grad: IndexedSlices, or a tensor of ``torch.sparse_coo`` with one sparse dimension; or a
                ``PerReplica`` of them, each of which counts as one gradient and is added on the
                device where it lies.
            local_step: see ``apply_grad``.
            name: ignored; TensorFlow's name of the operation.
            cast: see ``apply_grad``.

        Raises:
            TypeError: anything else.
            ValueError, CancelledError: what ``apply_grad`` raises.
        """
        return apply_grads([self], [grad], local_step, cast=cast)

    def take_grad(
        self,
        num_required: int | Variable,
        name: str | None = None,
        *,
        timeout: float | None = None,
        output_type: str | None = None,
        deadline: float | None = None,
    ) -> tuple[Any, Any, Any]:
        """As ``take_indexed_slices_grad``, in three parts.

        Args:
            num_required: see there, as for the others.
            name: ignored; TensorFlow's name of the operation.
            timeout: see there.
            output_type: see there.
            deadline: see there.

        Returns:
            The indices, a NumPy array, int64, rising; the rows, an array of the kind of the first
            gradient, over a mesh a ``Mirrored`` of such; and the shape of the whole array.
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
        output_type: str | None = None,
        deadline: float | None = None,
    ) -> IndexedSlices | Mirrored:
        """Blocks until ``num_required`` gradients are in, then hands out their mean or sum.

        All that arrived are included. MEAN divides each row by the number of gradients that
        touched it. Takes are served in the order of the calls. Afterwards the sum is gone, the
        count 0, the step one further.

        Args:
            num_required: at least 1; an integer, or a Variable that holds one.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait; None for ever.
            output_type: what the values of the result are instead of the kind of the first
                gradient; see ``ConditionalAccumulator.take_grad``.
            deadline: see ``ConditionalAccumulator.take_grad``.

        Returns:
            IndexedSlices with every index once, rising, on the accumulator's device; over a mesh a
            ``Mirrored`` of them; tensors of ``torch.sparse_coo`` if the first gradient was one.
            They are the caller's and never written again. The first entry of
            ``dense_shape`` is the accumulator's, else that of the first gradient, else -1.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1.
            DeadlineExceededError: the time ran out; nothing was taken.
            CancelledError: the accumulator was closed, or the mesh died while this waited.
            CollectiveError: the mesh is dead.
            ValueError: ``deadline`` is no number above 0.
        """
        (taken,) = take_grads(
            [self], num_required, timeout=timeout, output_type=output_type, deadline=deadline
        )
        made: IndexedSlices | Mirrored = taken
        return made
