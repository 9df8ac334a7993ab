"""How a worker comes and goes: it begins, maybe waits for the others, and starts at the centre."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from .center import AGNCenter

__all__ = ["AGNHook"]


class AGNHook:
    """Around a worker's training: a context manager, in which the worker is one of a centre.

    Entering is ``begin`` and ``after_create_session``; leaving is ``end``. An exception that leaves
    it passes on, and the centre counts the worker among its ``lost_workers``.

    Args:
        center: of the worker.
        start: copies the centre to the worker.
        task_index: of the worker.
        num_worker: for how many to wait.
        wait_timeout: seconds; None waits for nobody.
    """

    def __init__(
        self,
        center: AGNCenter,
        start: Callable[[], None],
        task_index: int,
        num_worker: int,
        wait_timeout: float | None,
    ) -> None:
        self._center, self._start, self._task = center, start, task_index
        self._num_worker, self._timeout = num_worker, wait_timeout

    def begin(self) -> None:
        """The worker is there."""
        self._center.begin(self._task)

    def after_create_session(self, session: Any = None, coord: Any = None) -> None:
        """Waits for the other workers, if it was told to, and starts at the centre.

        Args:
            session: ignored; TensorFlow's.
            coord: ignored; TensorFlow's.

        Raises:
            DeadlineExceededError: fewer workers than ``num_worker`` have begun in time; the text
                names who is missing.
        """
        if self._timeout is not None:
            self._center.wait_for(self._num_worker, self._timeout)
        self._start()

    def end(self, session: Any = None) -> None:
        """The worker is done. When all are, those who begin are of another training.

        Args:
            session: ignored; TensorFlow's.
        """
        self._center.end(self._task)

    def __enter__(self) -> Self:
        self.begin()
        try:
            self.after_create_session()
        except BaseException as error:
            self._center.lose(self._task, error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._center.lose(self._task, error)
        self.end()
