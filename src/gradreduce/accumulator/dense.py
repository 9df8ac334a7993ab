"""How arrivals of one gradient over time become one gradient: the public dense accumulator.

Source: tf.ConditionalAccumulator (conditional_accumulator.md, conditional_accumulator_summary.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.backends.device_names import DeviceLike
from gradreduce.device import Mesh
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .base import ConditionalAccumulatorBase
from .create import defined
from .multi import apply_grads, take_grads
from .validate import DEFAULT_STEP

__all__ = ["ConditionalAccumulator"]


class ConditionalAccumulator(ConditionalAccumulatorBase):
    """Adds gradients that are not stale, and hands out their mean when enough have come.

    Args:
        dtype: float16, bfloat16, float32 or float64; halves are summed in float32.
        shape: of the gradients; None for any, None entries for any extent. The first gradient
            after a take fixes what is open, until the next take.
        shared_name: if not empty, all accumulators of this name in the process are one, as long
            as a handle of it is held and until it is closed.
        name: of the accumulator.
        reduction_type: ``"MEAN"``, which divides by all that arrived, or ``"SUM"``.
        device: a device, its name (``"gpu:1"``), a ``torch.device``, or a whole mesh: then a
            partial sum is kept on each of its devices and all-reduced once, at the take. Default:
            that of the ``shared_name``, else device 0 of ``gr.default_mesh()``; names are looked up
            in the same mesh, or that of ``cross_device_ops``.
        cross_device_ops: any ``CrossDeviceOps``; reduces the partial sums of a mesh. Those of
            accumulators with the same one travel together at a joint take. Default: one
            ``AllReduceCrossDeviceOps`` for all. A subclass of your own is called, by
            ``reduce_batch``, while the accumulators are locked: it must not use them.

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
        name: str = "conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        device: DeviceLike | Mesh | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:  # fmt: skip
        state = defined(
            dtype, shape, shared_name, reduction_type, device, cross_device_ops=cross_device_ops
        )
        super().__init__(state, name)

    def apply_grad(
        self, grad: Any, local_step: int | Variable = DEFAULT_STEP, name: str | None = None, *,
        cast: bool = False,
    ) -> bool:  # fmt: skip
        """Adds a gradient, unless it is stale: ``local_step`` less than the accumulator's step.

        A later step than the accumulator's is not stale. Of what is, only the dtype and the
        constructor's shape are looked at: it costs the device nothing. Never blocks for a device;
        may serve takes that wait.

        Args:
            grad: an array, number or nested list; IndexedSlices, which are made dense (without a
                ``dense_shape`` they have the accumulator's, if that is known); or a ``PerReplica``
                of either, each replica of which counts as one gradient, in order. It is added on
                the device where it lies, if that is one of the accumulator's, else on the first of
                them. Not written, not kept: when this returns its library's current stream may
                overwrite it. A host array goes to the device of the enclosing ``gr.replica``, else
                to the first.
            local_step: the step at which it was computed: an int64, or a Variable that holds one;
                the ``global_step`` of then. The first drop of a gradient that came without one logs
                a warning.
            name: ignored; TensorFlow's name of the operation.
            cast: convert an array of another float dtype instead of refusing it.

        Returns:
            True if it was added, False if it was dropped.

        Raises:
            ValueError: an array of another dtype, a shape other than the constructor's, replicas
                that differ in shape, or a ``gr.replica`` that the mesh has not.
            DeviceMismatchError: it lies on a device of another mesh.
            InvalidArgumentError: another shape than the gradients in the sum.
            CancelledError: the accumulator was closed.
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
    ) -> Any:
        """Blocks until ``num_required`` gradients are in, then hands out their mean or sum.

        All that arrived are included, and MEAN divides by their number. Takes are served in the
        order of the calls. Afterwards the sum is gone, the count 0, the step one further.

        Args:
            num_required: at least 1; an integer, or a Variable that holds one.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait; None for ever.
            output_type: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or ``"buffer"``: what the
                result is instead of the kind of the first gradient.
            deadline: seconds that the devices may take for the gradient, counted from when enough
                have come; when they are over first, the mesh dies. ``timeout`` harms nothing.

        Returns:
            An array of the kind of the first gradient in it, on the accumulator's device; over a
            mesh a ``Mirrored``. It is the caller's and never written again.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1.
            DeadlineExceededError: the time ran out; nothing was taken.
            CancelledError: the accumulator was closed, or the mesh died while this waited.
            CollectiveError: the mesh is dead.
            ValueError: ``deadline`` is no number above 0.
        """
        return take_grads(
            [self], num_required, timeout=timeout, output_type=output_type, deadline=deadline
        )[0]
