"""Base class of the accumulators: step, count, closing, and checkpoints.

Source: tf.ConditionalAccumulatorBase (conditional_accumulator.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import downloader
from gradreduce.device import as_deadline
from gradreduce.device.process_group import check_one_process
from gradreduce.errors import NotCopied, listed

from .checkpoint import ready_state, saved_state
from .state import AccumulatorState
from .take_queue import close
from .validate import as_step


class ConditionalAccumulatorBase(NotCopied):
    """Base class of dense and sparse accumulators (tf.ConditionalAccumulatorBase).

    A context manager: leaving it closes the accumulator. All methods may be called from any
    thread, but not from a signal handler, which may interrupt a call of the same accumulator: set
    a flag there instead.
    """

    _copy_hint = "pass its state_dict(), and load that into a new one"

    _spans_processes = False

    def __init__(self, state: AccumulatorState, name: str) -> None:
        if state.over_mesh and not self._spans_processes:
            check_one_process(state.devices[0], f"{type(self).__name__} over a mesh")
        self._state = state
        self._name = str(name).rpartition("/")[2]
        state.name = state.name or self._name

    def __repr__(self) -> str:
        state = self._state  # read without its lock: a repr must not wait
        shape = "[?]" if state.shape is None else str(list(state.shape)).replace("None", "?")
        names = listed(device.name for device in state.devices)
        closed = ", closed" if state.closed else ""
        return (
            f"<{type(self).__name__} {self._name!r} {state.dtype}{shape} {state.reduction_type} on "
            f"{names}, global_step {state.step}, {state.count} accumulated, {state.num_dropped} "
            f"dropped{closed}>"
        )

    @property
    def accumulator_ref(self) -> AccumulatorState:
        """The shared state: the same object for equal ``shared_name``."""
        return self._state

    @property
    def name(self) -> str:
        """The last component of the constructor's ``name``: ``"y"`` for ``"Q/x/y"``."""
        return self._name

    @property
    def dtype(self) -> Any:
        """The dtype of the gradients."""
        return self._state.dtype

    @property
    def global_step(self) -> int:
        """The current step: gradients of an earlier step are stale."""
        with self._state.lock:
            return self._state.step

    @property
    def num_dropped(self) -> int:
        """The number of gradients that were dropped as stale."""
        with self._state.lock:
            return self._state.num_dropped

    def num_accumulated(self, name: str | None = None) -> int:
        """Returns the number of gradients in the sum now.

        Args:
            name: ignored; TensorFlow's name of the operation.

        Raises:
            CancelledError: the accumulator was closed.
        """
        with self._state.lock:
            self._state.check_open()
            return self._state.count

    def set_global_step(self, new_global_step: int | Variable, name: str | None = None) -> None:
        """Sets the step; logs a warning if it is smaller than before.

        Gradients in the sum stay. Waiting takes are not affected.

        Args:
            new_global_step: an integer, possibly negative, or a Variable that holds one, on any
                device.
            name: ignored; TensorFlow's name of the operation.

        Raises:
            TypeError: ``new_global_step`` is neither.
            InvalidArgumentError: it does not fit in int64.
            CancelledError: the accumulator was closed.
        """
        self._state.set_step(as_step("new_global_step", new_global_step))

    def close(self) -> None:
        """Frees the sum; waiting takes and all later calls raise ``CancelledError``.

        It may be called twice.
        """
        close(self._state)

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns a snapshot of the accumulator in host memory, for a checkpoint.

        Other threads may apply and take meanwhile: a copy of each partial sum is queued under the
        lock, in new memory on its device, and the host waits for the copies after releasing it.
        Waiting takes are not saved.

        Args:
            deadline: seconds from now for the copies to reach the host; after that the mesh fails.
            output_type: of the arrays, ``"numpy"``, or ``"torch"`` for tensors on the CPU, so that
                ``torch.load`` needs no ``weights_only=False``.

        Returns:
            A dict of new objects, for pickle, or for JSON except for the arrays in it:
            ``"format"``, the kind of accumulator and the version of these keys;
            ``"dtype"``, ``"reduction_type"``, ``"shape"``, as constructed (the shape as a list);
            ``"global_step"``, ``"num_accumulated"``, ``"num_dropped"``, integers;
            ``"sum_shape"``, the shape of the gradients in the sum, as a list;
            ``"kind"``, the array type that the next take returns: that of the first gradient in
            the sum;
            ``"partial_sums"``, a list with an array for each device, in mesh order, in the
            accumulate dtype (float32 for float16 and bfloat16, so nothing is rounded), or None for
            a device without gradients. A sparse accumulator has a dict instead of each array:
            ``"indices"`` (int64, ascending), ``"num_touches"`` (int64, the number of gradients
            that touched each index) and ``"values"``, the rows. With nothing in the sum the last
            three keys are None, None and a list of None.

        Raises:
            CancelledError: the accumulator was closed.
            BackendUnavailableError: its mesh was closed, or a device failed.
            CollectiveError: its mesh has failed, or failed meanwhile, possibly by the deadline.
            ValueError: ``deadline`` is not a number above 0, another ``output_type``, or PyTorch is
                not imported.
        """
        return saved_state(self._state, downloader(as_deadline(deadline), output_type))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents of the accumulator with a saved ``state_dict``.

        On error, the accumulator is unchanged. The state may come from another backend, but must
        have the same number of devices. The step is set without a warning, even if it is smaller
        than before. The next take returns the same bits as it would have when the state was saved.
        Waiting takes keep their place in the queue; those that now have enough gradients complete
        before this returns.

        Args:
            state: from ``state_dict``, or as a checkpoint format returns it: tuples, lists or
                arrays for lists, zero-dimensional arrays for numbers and strings, tensors for
                arrays. It is copied. A ``"kind"`` of CuPy means NumPy on simulated devices.

        Raises:
            KeyError: a key is missing or unknown.
            TypeError: a value has a wrong type.
            ValueError: the state has another kind of accumulator, ``dtype``, ``reduction_type``,
                ``shape`` or number of devices; its numbers contradict each other; or its
                ``"kind"`` belongs to a library that is not imported. The message of these three
                errors names the key.
            CancelledError: the accumulator was closed.
            BackendUnavailableError: its mesh was closed, or a device failed.
            CollectiveError: its mesh has failed, or failed meanwhile.
        """
        ready_state(self._state, state)()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        # After a fork, the child leaves the sum to its parent.
        if not self._state.mesh_state.is_inherited:
            self.close()
