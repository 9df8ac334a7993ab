"""The dense conditional accumulator.

Source: tf.ConditionalAccumulator (conditional_accumulator.md, conditional_accumulator_summary.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.arrays.types import OutputType, ReductionType
from gradreduce.arrays.variable import Variable
from gradreduce.backends.device_names import DeviceLike
from gradreduce.device import Mesh
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .base import ConditionalAccumulatorBase
from .create import create_state
from .dense_storage import DENSE
from .multi import apply_grads, take_grads
from .validate import DEFAULT_STEP


class ConditionalAccumulator(ConditionalAccumulatorBase):
    """Sums fresh gradients, and returns their mean or sum once enough have arrived.

    Args:
        dtype: float16, bfloat16, float32 or float64; 16-bit ones are summed in float32.
        shape: of the gradients; None for any, None entries for any extent. The first gradient
            after a take fixes the unknown extents until the next take.
        shared_name: if not empty, all accumulators of this name in the process share one state,
            until it is closed or the last of them is deleted.
        name: of the accumulator.
        reduction_type: ``"MEAN"``, which divides by the number of gradients, or ``"SUM"``.
        device: a device, its name (``"gpu:1"``), a ``torch.device``, or a mesh: then each of
            its devices keeps a partial sum, and a take all-reduces them. Default: the device of the
            accumulator named ``shared_name``, else device 0 of ``gr.default_mesh()``. Names are
            looked up in the same mesh, or in that of ``cross_device_ops``.
        cross_device_ops: any ``CrossDeviceOps``; reduces the partial sums of a mesh.
            ``take_grads`` reduces accumulators with the same one in one batch. Default: one
            ``AllReduceCrossDeviceOps`` for all. The ``reduce_batch`` of your own subclass is called
            while the accumulators are locked: it must not use them.

    Raises:
        TypeError: the dtype is not supported, ``device`` is neither a device nor a mesh, or
            ``cross_device_ops`` is not a ``CrossDeviceOps``.
        ValueError: ``reduction_type`` is unknown, an extent is negative, the mesh does not have
            the device, or ``shared_name`` exists with other arguments.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: ReductionType = "MEAN",
        *,
        device: DeviceLike | Mesh | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:  # fmt: skip
        state = create_state(
            dtype, shape, shared_name, reduction_type, device, cross_device_ops, DENSE
        )
        super().__init__(state, name)

    def apply_grad(
        self, grad: Any, local_step: int | Variable = DEFAULT_STEP, name: str | None = None, *,
        cast: bool = False,
    ) -> bool:  # fmt: skip
        """Adds a gradient unless it is stale (``local_step`` below the accumulator's step).

        A later step than the accumulator's is not stale. A stale gradient is only checked for dtype
        and shape; nothing is launched. Does not wait for a device. May complete waiting takes.

        Args:
            grad: an array, number or nested list; IndexedSlices, which are converted to a dense
                array (without a ``dense_shape`` they have the accumulator's shape, if that is
                known); or a ``PerReplica`` of either, each replica of which counts as one gradient,
                in order. It is added on its own device if the accumulator uses that one, else on
                the accumulator's first device. When this returns, work on its library's current
                stream may overwrite it. A host array goes to the device of the enclosing
                ``gr.replica``, else to the first.
            local_step: the ``global_step`` with which the gradient was computed: an int64, or a
                Variable that holds one. The first drop of a gradient without it logs a warning.
            name: ignored; TensorFlow's name of the operation.
            cast: convert an array of another float dtype instead of raising ``ValueError``.

        Returns:
            True if it was added, False if it was dropped.

        Raises:
            ValueError: the dtype or the shape differs from the constructor's, replicas differ in
                shape, or the mesh does not have the enclosing ``gr.replica``.
            DeviceMismatchError: the gradient is on a device of another mesh.
            InvalidArgumentError: the shape differs from that of the gradients in the sum.
            CancelledError: the accumulator was closed.
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
    ) -> Any:
        """Blocks until the sum has ``num_required`` gradients; returns their mean or sum.

        All gradients in the sum are included, and MEAN divides by their number. Takes complete in
        the order of the calls. Afterwards the sum is empty, and the step is one higher.

        Args:
            num_required: at least 1; an integer, or a Variable that holds one.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait for gradients; None waits without limit.
            output_type: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or ``"buffer"``: the
                array type of the result. Default: that of the first gradient.
            deadline: seconds for the devices to compute the result, from when enough gradients
                have arrived; after that the mesh fails. A ``timeout`` has no such effect.

        Returns:
            An array on the accumulator's device; over a mesh a ``Mirrored``. The caller owns it.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1.
            DeadlineExceededError: the timeout expired; nothing was taken.
            CancelledError: the accumulator was closed, or the mesh failed while this waited.
            CollectiveError: the mesh has failed.
            ValueError: ``deadline`` is not a number above 0.
        """
        return take_grads(
            [self], num_required, timeout=timeout, output_type=output_type, deadline=deadline
        )[0]
