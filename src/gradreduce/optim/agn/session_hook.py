"""Session hook of AGN: registers a worker, and starts it from the center."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from .center import AGNCenter


@dataclass(frozen=True)
class AGNHook:
    """Context manager around a worker's training that registers it with the center.

    Entering calls ``begin`` and ``after_create_session``, leaving calls ``end``. Exceptions
    propagate, and the center adds the worker to its ``failed_workers``.

    Its fields are the center, the function that copies the center to the worker, the worker's
    task index, the number of workers to wait for, and for how many seconds (None: do not wait).
    """

    _center: AGNCenter
    _start: Callable[[], None]
    _task: int
    _num_worker: int
    _timeout: float | None

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
