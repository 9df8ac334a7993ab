"""The dense and the sparse conditional accumulator.

Source: tf.ConditionalAccumulator and tf.SparseConditionalAccumulator (conditional_accumulator.md,
conditional_accumulator_summary.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.arrays.distributed import Mirrored, PerReplica, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices, as_slices
from gradreduce.arrays.types import OutputType, ReductionType, SparseMean
from gradreduce.arrays.variable import Variable
from gradreduce.backends.device_names import DeviceLike
from gradreduce.device import Mesh, as_flag
from gradreduce.ops import NUM_WORDS, as_num_words
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .base import ConditionalAccumulatorBase, create_state
from .dense_storage import DENSE
from .exact_sparse_storage import exact_sparse_storage
from .exact_storage import exact_storage
from .multi import add_all, take_all
from .sparse_storage import SPARSE
from .validate import DEFAULT_STEP, as_rows, check_sparse_mean


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
        exact: True adds the gradients as real numbers and rounds their sum once, by a take, so that
            neither the order of the gradients nor their devices change a bit. Then
            ``cross_device_ops`` must have ``exact=True``, too. See docs/same_bits.md.
        words: how many floats hold an element of an exact sum, 2 to 8. A sum that does not fit into
            them raises ``gr.InexactSumWarning``.

    Raises:
        TypeError: ``dtype`` is not supported, ``device`` is neither a device nor a mesh, or
            ``cross_device_ops`` is not a ``CrossDeviceOps``; ``exact`` is not a bool; or ``shape``
            is not a list of integers and None.
        ValueError: ``reduction_type`` is unknown, an extent is negative, the mesh does not have
            the device, ``shared_name`` exists with other arguments, ``words`` is not 2 to 8, or
            ``cross_device_ops`` is not exact, or would round the terms by its ``wire_dtype``.
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

    def __init__(  # noqa: PLR0913  # options of one call
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str | None = "conditional_accumulator",
        reduction_type: ReductionType = "MEAN",
        *,
        device: DeviceLike | Mesh | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        exact: bool = False,
        words: int = NUM_WORDS,
    ) -> None:
        num_words = as_num_words(words)
        storage = exact_storage(num_words) if as_flag("exact", exact) else DENSE
        state = create_state(
            dtype, shape, shared_name, reduction_type, device, cross_device_ops, storage
        )
        super().__init__(state, "conditional_accumulator" if name is None else name)

    def apply_grad(
        self, grad: Any, local_step: int | Variable = DEFAULT_STEP, name: str | None = None, *,
        cast: bool = False, weight: float | Sequence[float] = 1,
    ) -> bool:  # fmt: skip
        """Adds a gradient, or drops it if it is stale.

        A gradient is stale if ``local_step`` is below ``global_step``. A step above ``global_step``
        is not stale. The dtype and shape of a stale gradient are checked, but nothing is launched.
        The host waits only to download the value of a Variable, or indices from a GPU. The call
        completes waiting takes that now have enough gradients.

        Args:
            grad: an array, a number or a nested list; IndexedSlices, which are converted to a dense
                array, or of which each row is a term of an exact sum; or a ``PerReplica`` of these,
                each replica of which counts as one gradient, added in order. IndexedSlices without
                a ``dense_shape`` get the accumulator's shape, if it is known. A gradient is added
                on its own device if the accumulator uses that device, otherwise on the
                accumulator's first device. A host array goes to the device of the enclosing
                ``gr.replica``, otherwise to the first. After the call, work on the current stream
                of the array's library may overwrite the array.
            local_step: the ``global_step`` with which the gradient was computed: an int64, or a
                Variable that holds one. The first time that a gradient without ``local_step`` is
                dropped, a warning is logged.
            name: ignored; TensorFlow's name of the operation.
            cast: convert an array of another float dtype instead of raising ``ValueError``.
            weight: a number of at least 0, such as the number of examples of the gradient; for a
                ``PerReplica`` also a list with one for each replica. The gradient is multiplied by
                it, rounded once to the accumulate dtype, and a MEAN divides by the sum of the
                weights. A gradient with weight 0 is counted but not read, and may be None.

        Returns:
            True if the gradient was added, False if it was dropped.

        Raises:
            ValueError: the dtype or the shape differs from the constructor's, replicas differ in
                shape, or the mesh does not have the enclosing ``gr.replica``.
            TypeError: the gradient is not an array, ``local_step`` is not an integer or a Variable,
                or ``weight`` is not a number on the host.
            DeviceMismatchError: the gradient is on a device of another mesh.
            InvalidArgumentError: the shape differs from that of the gradients in the sum, or
                ``local_step`` does not fit in int64.
            CancelledError: the accumulator was closed.

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
        return add_all((self._state,), (grad,), local_step, cast, weight)

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
        return take_all((self._state,), num_required, timeout, output_type, deadline)[0]


class SparseConditionalAccumulator(ConditionalAccumulatorBase):
    """Sums sparse gradients, and returns their mean or sum once enough have arrived.

    A sparse gradient is a list of rows, each with the index that it has in a larger array. Indices
    may be unsorted and may repeat. Rows with the same index are added, first those of one gradient,
    in order, then gradient by gradient. Gradients of an earlier step than the accumulator's are
    stale and are dropped. Source: ``tf.SparseConditionalAccumulator``.

    Memory is allocated for the indices that gradients touched, and for at most as many rows again.
    A gradient is added by one launch and one small upload of its indices. If the sum outgrows its
    memory, it is copied first. The host waits only to download indices from a GPU.

    Args:
        dtype: dtype of the values: float16, bfloat16, float32 or float64. 16-bit values are summed
            in float32.
        shape: shape of the whole array, ``(rows, …)``; None or () for any shape, and an entry of
            None for any extent. Gradients may have more dimensions.
        shared_name: if not empty, all accumulators of this name in the process share one state,
            until it is closed or the last of them is deleted. Accumulators that several processes
            share are in ``gr.ray``.
        name: name of the accumulator, for error messages.
        reduction_type: ``"SUM"``; or ``"MEAN"``, which divides each row as ``sparse_mean`` says.
        sparse_mean: ``"per_row"``: MEAN divides each row by the number of gradients that touched
            its index. ``"per_gradient"``: it divides by the number of all gradients in the sum, as
            a ``ConditionalAccumulator`` does; each replica of a ``PerReplica`` counts, and so does
            a gradient without rows. Not with ``"SUM"``.
        device: see ``ConditionalAccumulator``. On a mesh, each device keeps a partial sum, and a
            take merges their rows on the first device, in mesh order.
        cross_device_ops: an ``AllReduceCrossDeviceOps``. Only its mesh is used, to look up names of
            devices.
        exact: True adds rows with the same index as real numbers and rounds their sum once, by a
            take; see ``ConditionalAccumulator``.
        words: how many floats hold an element of an exact sum, 2 to 8; see
            ``ConditionalAccumulator``.

    Raises:
        TypeError: ``dtype`` is not supported, ``device`` is neither a device nor a mesh, or
            ``cross_device_ops`` is not a ``CrossDeviceOps``, or, on a mesh, not an
            ``AllReduceCrossDeviceOps``; ``exact`` is not a bool; or ``shape`` is not a list of
            integers and None.
        ValueError: ``reduction_type`` or ``sparse_mean`` is unknown, ``sparse_mean`` is
            ``"per_gradient"`` with ``"SUM"``, an extent is negative, the mesh does not have the
            device, ``shared_name`` exists with other arguments, ``words`` is not 2 to 8, or
            ``cross_device_ops`` is not exact.
        RuntimeError: the mesh has several processes, and ``device`` is the mesh or ``shared_name``
            is not empty.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> accumulator = gr.SparseConditionalAccumulator(
        ...     "float32", [1000, 2], device=mesh.devices[0]
        ... )
        >>> accumulator.apply_grad([7, 2], [[1.0, 1.0], [2.0, 2.0]])
        True
        >>> accumulator.apply_grad([7], [[3.0, 3.0]])
        True
        >>> indices, values, shape = accumulator.take_grad(2)
        >>> indices
        array([2, 7])
        >>> values  # two gradients touched row 7, one touched row 2
        array([[2., 2.],
               [2., 2.]], dtype=float32)
        >>> shape
        (1000, 2)

        With ``"per_gradient"`` both rows are divided by two:

        >>> mean = gr.SparseConditionalAccumulator(
        ...     "float32", device=mesh.devices[0], sparse_mean="per_gradient"
        ... )
        >>> mean.apply_grad([7, 2], [[1.0], [2.0]]), mean.apply_grad([7], [[3.0]])
        (True, True)
        >>> mean.take_grad(2)[1]
        array([[1.],
               [2.]], dtype=float32)
    """

    def __init__(  # noqa: PLR0913  # options of one call
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str | None = "sparse_conditional_accumulator",
        reduction_type: ReductionType = "MEAN",
        *,
        sparse_mean: SparseMean = "per_row",
        device: DeviceLike | Mesh | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        exact: bool = False,
        words: int = NUM_WORDS,
    ) -> None:
        check_sparse_mean(sparse_mean, reduction_type)
        num_words = as_num_words(words)
        storage = exact_sparse_storage(num_words) if as_flag("exact", exact) else SPARSE
        state = create_state(
            dtype, shape, shared_name, reduction_type, device, cross_device_ops, storage,
            sparse_mean,
        )  # fmt: skip
        super().__init__(state, "sparse_conditional_accumulator" if name is None else name)

    def apply_grad(
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Sequence[int] | None = None,
        local_step: int | Variable = DEFAULT_STEP,
        name: str | None = None,
        *,
        cast: bool = False,
        weight: float = 1,
    ) -> bool:
        """Adds a gradient, or drops it if it is stale (``local_step`` below ``global_step``).

        A gradient without rows is counted too. On error, nothing was added. The host waits only for
        indices on a GPU, or to download the value of a Variable.

        Args:
            grad_indices: the index of each row, ``(num_rows,)``: integers of any dtype, in any
                order, in an array of any library or a list.
            grad_values: the rows, ``(num_rows, …)``: an array of any library, or a nested list. A
                host array goes to the device of the enclosing ``gr.replica``, otherwise to the
                first device. After the call, work on the current stream of the array's library may
                overwrite the array.
            grad_shape: the shape of the whole array, if known; its first entry may be -1 for
                unknown. The shape in the first gradient after a take is the shape of the result,
                and limits the indices of later gradients.
            local_step: the ``global_step`` with which the gradient was computed; see
                ``ConditionalAccumulator.apply_grad``.
            name: ignored; TensorFlow's name of the operation.
            cast: convert values of another float dtype instead of raising ``ValueError``.
            weight: see ``ConditionalAccumulator.apply_grad``. MEAN divides a row by the sum of the
                weights of the gradients that touched it, or with ``"per_gradient"`` of all.

        Returns:
            True if the gradient was added, False if it was dropped.

        Raises:
            InvalidArgumentError: (a ``ValueError``) the numbers of indices and rows differ, an
                index is negative or too large, or a shape does not fit the accumulator's shape or
                the gradients in the sum; or ``local_step`` does not fit in int64.
            ValueError: the values have another dtype.
            TypeError: the indices are not integers, or ``local_step`` is not an integer or a
                Variable.
            DeviceMismatchError: the gradient is on a device of another mesh.
            CancelledError: the accumulator was closed.
        """
        self._state.mesh_state.check_process()
        slices = as_rows(grad_values, grad_indices, grad_shape, self.dtype, weight)
        return add_all((self._state,), (slices,), local_step, cast, weight)

    def apply_indexed_slices_grad(
        self,
        grad: IndexedSlices | PerReplica | Any,
        local_step: int | Variable = DEFAULT_STEP,
        name: str | None = None,
        *,
        cast: bool = False,
        weight: float | Sequence[float] = 1,
    ) -> bool:
        """Adds a gradient that is one object, or drops it if it is stale.

        Args:
            grad: IndexedSlices, or a PyTorch tensor in ``torch.sparse_coo`` layout with one sparse
                dimension; or a ``PerReplica`` of these, each replica of which counts as one
                gradient and is added on its own device.
            local_step: see ``apply_grad``.
            name: ignored; TensorFlow's name of the operation.
            cast: see ``apply_grad``.
            weight: see ``apply_grad``; for a ``PerReplica`` also a list with one for each replica.

        Returns:
            True if the gradient was added, False if it was dropped.

        Raises:
            TypeError: ``grad`` has another type.
            ValueError, DeviceMismatchError, CancelledError: see ``apply_grad``.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> accumulator = gr.SparseConditionalAccumulator("float32", device=mesh.devices[0])
            >>> grad = gr.IndexedSlices(np.float32([[1, 2]]), [4], dense_shape=(8, 2))
            >>> accumulator.apply_indexed_slices_grad(grad)
            True
            >>> accumulator.take_indexed_slices_grad(1)
            IndexedSlices(indices=[4], values=float32[1, 2], dense_shape=(8, 2))
        """
        return add_all((self._state,), (grad,), local_step, cast, weight)

    def take_grad(
        self,
        num_required: int | Variable,
        name: str | None = None,
        *,
        timeout: float | None = None,
        output_type: OutputType | None = None,
        deadline: float | None = None,
    ) -> tuple[Any, Any, tuple[int, ...] | None]:
        """Does what ``take_indexed_slices_grad`` does, and returns indices, rows and shape.

        It raises the same errors. Example: see the class.

        Args:
            num_required: see ``take_indexed_slices_grad``.
            name: ignored; TensorFlow's name of the operation.
            timeout: see ``take_indexed_slices_grad``.
            output_type: see ``take_indexed_slices_grad``.
            deadline: see ``take_indexed_slices_grad``.

        Returns:
            The indices, an ascending NumPy array of int64; the rows, an array of ``output_type``
            or, for an accumulator over a mesh, a ``Mirrored``; and the shape of the whole array.
        """
        taken = as_slices(
            self.take_indexed_slices_grad(
                num_required, timeout=timeout, output_type=output_type, deadline=deadline
            )
        )
        if isinstance(taken, IndexedSlices):
            return taken.indices, taken.values, taken.dense_shape
        first: Any = taken.parts[0]
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
        touched its index, or with ``sparse_mean="per_gradient"`` by the number of all gradients.
        Takes complete in the order of the calls. After the take the sum is empty and
        ``global_step`` is one higher.

        Args:
            num_required: an integer of at least 1, or a Variable that holds one.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait for gradients; None waits without limit.
            output_type: the array type of the values; see ``ConditionalAccumulator.take_grad``.
                Default: the type of the first gradient.
            deadline: see ``ConditionalAccumulator.take_grad``.

        Returns:
            IndexedSlices on the accumulator's device, with ascending indices that do not repeat;
            for an accumulator over a mesh, a ``Mirrored`` of them. If the first gradient was a
            ``torch.sparse_coo`` tensor, such tensors. The caller owns them. The first entry of
            ``dense_shape`` is the accumulator's if known, otherwise that of the first gradient if
            known, otherwise -1.

        Raises:
            InvalidArgumentError: ``num_required`` is less than 1, or the step is 2**63 - 1.
            DeadlineExceededError: the timeout expired; nothing was taken.
            CancelledError: the accumulator was closed, or the mesh failed during the wait.
            ValueError: ``deadline`` is not a number above 0, or ``output_type`` is unknown or its
                library is not imported.
            TypeError: ``num_required`` is not an integer or a Variable, or ``timeout`` is not a
                number.
        """
        return take_all(  # type: ignore[no-any-return]
            (self._state,), num_required, timeout, output_type, deadline
        )[0]
