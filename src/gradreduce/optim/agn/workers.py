"""Threads of workers; what happens in one is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["WorkerThread"]


class WorkerThread(threading.Thread):
    """A thread whose ``join`` raises what ended it.

    Args:
        task_index: of the worker.
        work: what it does.
        lose: told that, with the task index.
    """

    def __init__(
        self,
        task_index: int,
        work: Callable[[], object],
        lose: Callable[[int, BaseException], None],
    ) -> None:
        super().__init__(name=f"agn-worker-{task_index}", daemon=True)
        self._task, self._work, self._lose = task_index, work, lose
        self._error: BaseException | None = None

    def run(self) -> None:
        """The work."""
        try:
            self._work()
        except BaseException as error:  # whoever joins gets it
            self._error = error
            self._lose(self._task, error)
        finally:
            del self._work, self._lose  # whoever keeps the thread keeps nothing of the training

    def join(self, timeout: float | None = None) -> None:
        """Waits until the worker has ended, and raises the exception that ended it.

        Args:
            timeout: seconds; afterwards ``is_alive()`` says whether it has ended.
        """
        super().join(timeout)
        if not self.is_alive() and self._error is not None:
            raise self._error
