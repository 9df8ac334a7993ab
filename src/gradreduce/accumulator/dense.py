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
    """Sums dense gradients, and returns their mean or sum once enough have arrived.

    Gradients of an earlier step than the accumulator's are stale and are dropped.
    Source: ``tf.ConditionalAccumulator``.

    Args:
        dtype: dtype of gradients and results: float16, bfloat16, float32 or float64. 16-bit
            gradients are summed in float32.
        shape: shape of the gradients; None for any shape, and an entry of None for any extent. The
            first gradient after a take fixes unknown extents until the next take.
        shared_name: if not empty, all accumulators of this name in the process share one state,
            until it is closed or the last of them is deleted. Accumulators that several processes
            share are in ``gr.ray``.
        name: name of the accumulator, for error messages.
        reduction_type: ``"MEAN"``, which divides by the number of gradients, or ``"SUM"``.
        device: a device, its name (``"gpu:1"``), a ``torch.device``, or a mesh. On a mesh, each
            device keeps a partial sum, and a take all-reduces the partial sums. Default: the device
            of the accumulator named ``shared_name``, or device 0 of ``gr.default_mesh()``. A name
            is looked up in the mesh of that accumulator, of ``cross_device_ops``, or the default
            mesh.
        cross_device_ops: a ``CrossDeviceOps`` that reduces the partial sums of a mesh.
            ``take_grads`` reduces accumulators with the same ``CrossDeviceOps`` in one batch.
            Default: an ``AllReduceCrossDeviceOps`` that all accumulators share. If you write a
            subclass, its ``reduce_batch`` must not use accumulators, because they are locked when
            it is called.

    Raises:
        TypeError: ``dtype`` is not supported, ``device`` is neither a device nor a mesh, or
            ``cross_device_ops`` is not a ``CrossDeviceOps``; or ``shape`` is not a list of integers
            and None.
        ValueError: ``reduction_type`` is unknown, an extent is negative, the mesh does not have
            the device, or ``shared_name`` exists with other arguments.
        RuntimeError: the mesh has several processes, and ``device`` is the mesh or ``shared_name``
            is not empty.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> accumulator = gr.ConditionalAccumulator("float32", [2], device=mesh)
        >>> with gr.replica(1):  # the device that the next array goes to
        ...     accumulator.apply_grad([1.0, 2.0], local_step=0)
        True
        >>> accumulator.apply_grad([3.0, 6.0], local_step=0)
        True
        >>> accumulator.take_grad(2).values  # the mean, on both devices
        (array([2., 4.], dtype=float32), array([2., 4.], dtype=float32))
        >>> accumulator.apply_grad([5.0, 5.0], local_step=0)  # stale: global_step is now 1
        False
    """

    def __init__(
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str | None = "conditional_accumulator",
        reduction_type: ReductionType = "MEAN",
        *,
        device: DeviceLike | Mesh | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:  # fmt: skip
        state = create_state(
            dtype, shape, shared_name, reduction_type, device, cross_device_ops, DENSE
        )
        super().__init__(state, "conditional_accumulator" if name is None else name)

    def apply_grad(
        self, grad: Any, local_step: int | Variable = DEFAULT_STEP, name: str | None = None, *,
        cast: bool = False,
    ) -> bool:  # fmt: skip
        """Adds a gradient, or drops it if it is stale.

        A gradient is stale if ``local_step`` is below ``global_step``. A step above ``global_step``
        is not stale. The dtype and shape of a stale gradient are checked, but nothing is launched.
        The host waits only to download the value of a Variable, or indices from a GPU. The call
        completes waiting takes that now have enough gradients.

        Args:
            grad: an array, a number or a nested list; IndexedSlices, which are converted to a dense
                array; or a ``PerReplica`` of these, each replica of which counts as one gradient,
                added in order. IndexedSlices without a ``dense_shape`` get the accumulator's shape,
                if it is known. A gradient is added on its own device if the accumulator uses that
                device, otherwise on the accumulator's first device. A host array goes to the device
                of the enclosing ``gr.replica``, otherwise to the first. After the call, work on the
                current stream of the array's library may overwrite the array.
            local_step: the ``global_step`` with which the gradient was computed: an int64, or a
                Variable that holds one. The first time that a gradient without ``local_step`` is
                dropped, a warning is logged.
            name: ignored; TensorFlow's name of the operation.
            cast: convert an array of another float dtype instead of raising ``ValueError``.

        Returns:
            True if the gradient was added, False if it was dropped.

        Raises:
            ValueError: the dtype or the shape differs from the constructor's, replicas differ in
                shape, or the mesh does not have the enclosing ``gr.replica``.
            TypeError: the gradient is not an array, or ``local_step`` is not an integer or a
                Variable.
            DeviceMismatchError: the gradient is on a device of another mesh.
            InvalidArgumentError: the shape differs from that of the gradients in the sum, or
                ``local_step`` does not fit in int64.
            CancelledError: the accumulator was closed.
            CollectiveError: the mesh has failed.
            BackendUnavailableError: the mesh is closed, or a device has failed.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> accumulator = gr.ConditionalAccumulator("float32", device=mesh)
            >>> step = accumulator.global_step  # read before the gradient is computed
            >>> accumulator.apply_grad(np.float32([1, 2]), local_step=step)
            True
            >>> accumulator.apply_grad(np.float64([1, 2]), local_step=step, cast=True)
            True
            >>> accumulator.num_accumulated()
            2
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
        the order of the calls. After the take the sum is empty and ``global_step`` is one higher.

        Args:
            num_required: an integer of at least 1, or a Variable that holds one.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait for gradients; None waits without limit.
            output_type: the array type of the result: ``"numpy"``, ``"cupy"``, ``"torch"``,
                ``"jax"`` or ``"buffer"``. Default: the type of the first gradient.
            deadline: seconds for the devices to compute the result, counted from when enough
                gradients have arrived; after that the mesh fails. An expired ``timeout`` does not
                make the mesh fail.

        Returns:
            An array on the accumulator's device; for an accumulator over a mesh, a ``Mirrored``.
            The caller owns it.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1, or the step is 2**63 - 1.
            DeadlineExceededError: the timeout expired; nothing was taken.
            CancelledError: the accumulator was closed, or the mesh failed during the wait.
            CollectiveError: the mesh has failed.
            BackendUnavailableError: the mesh is closed, or a device has failed.
            ValueError: ``deadline`` is not a number above 0, or ``output_type`` is unknown or its
                library is not imported.
            TypeError: ``num_required`` is not an integer or a Variable, or ``timeout`` is not a
                number.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> accumulator = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
            >>> accumulator.apply_grad([1.0, 2.0])
            True
            >>> accumulator.apply_grad([3.0, 4.0])
            True
            >>> accumulator.take_grad(1)  # two have arrived, and both are in the mean
            array([2., 3.], dtype=float32)
            >>> try:
            ...     accumulator.take_grad(1, timeout=0.01)
            ... except gr.DeadlineExceededError:
            ...     print("no new gradient within 10 ms")
            no new gradient within 10 ms
        """
        return take_grads(
            [self], num_required, timeout=timeout, output_type=output_type, deadline=deadline
        )[0]
