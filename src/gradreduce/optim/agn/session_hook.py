"""Session hook of AGN: registers a worker, and starts it from the center."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from .center import AGNCenter


class AGNHook:
    """Context manager around a worker's training that registers it with the center.

    Entering calls ``begin`` and ``after_create_session``, leaving calls ``end``. Exceptions
    propagate, and the center adds the worker to its ``failed_workers``.

    Args:
        center: of the worker.
        start: copies the center to the worker.
        task_index: of the worker.
        num_worker: number of workers to wait for.
        wait_timeout: seconds; None: do not wait.
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
        """Registers the worker with the center."""
        self._center._begin(self._task)

    def after_create_session(self, session: Any = None, coord: Any = None) -> None:
        """Waits for the other workers if a timeout was set, and copies the center.

        Args:
            session: ignored; TensorFlow's.
            coord: ignored; TensorFlow's.

        Raises:
            DeadlineExceededError: fewer workers than ``num_worker`` have started in time; the
                message lists the missing ones.
        """
        if self._timeout is not None:
            self._center._wait_for(self._num_worker, self._timeout)
        self._start()

    def end(self, session: Any = None) -> None:
        """Unregisters the worker. After all have ended, workers that begin form a new training.

        Args:
            session: ignored; TensorFlow's.
        """
        self._center._end(self._task)

    def __enter__(self) -> Self:
        self.begin()
        try:
            self.after_create_session()
        except BaseException as error:
            self._center._mark_failed(self._task, error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._center._mark_failed(self._task, error)
        self.end()
