"""What every accumulator has, whatever its gradients look like: step, count, waiting, closing.

Source: tf.ConditionalAccumulatorBase (conditional_accumulator.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.device import as_deadline
from gradreduce.errors import NotCopied, listed

from .checkpoint import load_state, saved_state
from .state import AccumulatorState
from .take_queue import close
from .validate import as_step

__all__ = ["ConditionalAccumulatorBase"]


class ConditionalAccumulatorBase(NotCopied):
    """What dense and sparse accumulators share (tf.ConditionalAccumulatorBase).

    A context manager: leaving it closes the accumulator. All methods may be called from any
    thread, but not from a signal handler: what it interrupts may be half way. Set a flag there.
    """

    _copied_as = "pass its state_dict(), and load that into a new one"

    def __init__(self, state: AccumulatorState, name: str) -> None:
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
        """The last component of the name that was given: ``"y"`` for ``"Q/x/y"``."""
        return self._name

    @property
    def dtype(self) -> Any:
        """Of the gradients."""
        return self._state.dtype

    @property
    def global_step(self) -> int:
        """Gradients of an earlier step than this are stale."""
        with self._state.lock:
            return self._state.step

    @property
    def num_dropped(self) -> int:
        """How many gradients were dropped as stale."""
        with self._state.lock:
            return self._state.num_dropped

    def num_accumulated(self, name: str | None = None) -> int:
        """How many gradients are in the sum now.

        Args:
            name: ignored; TensorFlow's name of the operation.

        Raises:
            CancelledError: the accumulator was closed.
        """
        with self._state.lock:
            self._state.check_open()
            return self._state.count

    def set_global_step(self, new_global_step: int | Variable, name: str | None = None) -> None:
        """Sets the step; a smaller one than before is logged as a warning and takes effect.

        Gradients in the sum stay, waiting takes are not looked at.

        Args:
            new_global_step: an integer, below 0 too, or a Variable that holds one, on any devices.
            name: ignored; TensorFlow's name of the operation.

        Raises:
            TypeError: neither.
            InvalidArgumentError: it does not fit in int64.
            CancelledError: the accumulator was closed.
        """
        self._state.set_step(as_step("new_global_step", new_global_step))

    def close(self) -> None:
        """Frees the sum; waiting takes and all later calls raise ``CancelledError``.

        Calling it twice is fine.
        """
        close(self._state)

    def state_dict(self, *, deadline: float | None = None) -> dict[str, Any]:
        """What a checkpoint needs: all that the accumulator holds, at one moment, in host memory.

        Other threads may apply and take meanwhile: a copy of each partial sum is queued under the
        lock, in new memory on its device, and the host waits for the copies outside of it. Takes
        that wait are no part of it.

        Args:
            deadline: seconds from now for the copies to reach the host, or the mesh dies.

        Returns:
            A dict of new objects, for pickle, or for JSON but for the arrays in it:
            ``"format"``, which kind of accumulator, and the version of these keys;
            ``"dtype"``, ``"reduction_type"``, ``"shape"``, as constructed (the shape a list);
            ``"global_step"``, ``"num_accumulated"``, ``"num_dropped"``, integers;
            ``"sum_shape"``, a list, of the gradients in the sum;
            ``"kind"``, what the next take hands out: that of the first gradient in the sum;
            ``"partial_sums"``, a list with a NumPy array for each device, in mesh order, in the
            accumulate type (float32 for halves, so nothing is rounded), or None where nothing
            came; of a sparse accumulator a dict of three instead of the array: ``"indices"``
            (int64, rising), ``"num_touches"`` (int64, how many gradients touched each) and
            ``"values"``, the rows. With nothing in the sum the last three are None, None and a list
            of None.

        Raises:
            CancelledError: the accumulator was closed.
            BackendUnavailableError: its mesh was closed, or a device lost.
            CollectiveError: its mesh is dead, or died meanwhile, of the deadline maybe.
            ValueError: ``deadline`` is no number above 0.
        """
        return saved_state(self._state, as_deadline(deadline))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts a ``state_dict`` back, in place of all that the accumulator holds, or nothing.

        The backend may be another than it came from, the number of devices may not. The step is
        what the state says, without a warning where it goes back: that is what loading is for.
        What the next take gives has the bits that it would have had. Takes that wait stay in
        their places; those that now have enough are served before this returns.

        Args:
            state: from ``state_dict``, or what a store made of it: tuples, lists or arrays for
                lists, arrays without dimensions for numbers and strings, tensors for arrays.
                Copied, not kept. CuPy's ``"kind"`` is NumPy's on simulated devices.

        Raises:
            KeyError: a key is missing or unknown.
            TypeError: a value of another type.
            ValueError: the state is of another kind of accumulator, ``dtype``,
                ``reduction_type``, ``shape`` or number of devices; its numbers do not fit each
                other; or its ``"kind"`` is of a library that is not imported. The text of these
                three names the key.
            CancelledError: the accumulator was closed.
            BackendUnavailableError: its mesh was closed, or a device lost.
            CollectiveError: its mesh is dead, or died meanwhile.
        """
        load_state(self._state, state)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._state.devices[
            0
        ].mesh_state.is_inherited:  # a child may leave the parent's block
            self.close()
