"""What every accumulator has, whatever its gradients look like: step, count, waiting, closing.

Source: tf.ConditionalAccumulatorBase (conditional_accumulator.md).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from gradreduce.variables import Variable

from .door import as_step
from .serve import close
from .state import AccumulatorState

__all__ = ["ConditionalAccumulatorBase"]


class ConditionalAccumulatorBase:
    """What dense and sparse accumulators share (tf.ConditionalAccumulatorBase).

    A context manager: leaving it closes the accumulator. All methods may be called from any
    thread.
    """

    def __init__(self, state: AccumulatorState, name: str) -> None:
        self._state = state
        self._name = str(name).rpartition("/")[2]

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

    def state_dict(self) -> dict[str, Any]:
        """Step, count, dropped and partial sum.

        Raises:
            NotImplementedError: always, in this version.
        """
        raise NotImplementedError("state_dict of an accumulator is not implemented yet")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts a ``state_dict`` back.

        Raises:
            NotImplementedError: always, in this version.
        """
        raise NotImplementedError("load_state_dict of an accumulator is not implemented yet")

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
