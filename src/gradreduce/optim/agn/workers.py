"""Threads of workers; what happens in one is not lost."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

__all__ = ["WorkerThread"]


class WorkerThread(threading.Thread):
    """A thread whose ``join`` raises what ended it; whoever keeps it keeps nothing of the training.

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
        self._said = ""  # of it, when it was raised

    def run(self) -> None:
        """The work."""
        try:
            self._work()
        except BaseException as error:  # whoever joins gets it
            self._error = error
            self._lose(self._task, error)
            _let_go(error)
        finally:
            del self._work, self._lose

    def join(self, timeout: float | None = None) -> None:
        """Waits until the worker has ended, and raises the exception that ended it.

        The first time that one itself, which is not kept then: it holds the frames of whoever got
        it, and so all that these hold. Later a ``RuntimeError`` that names it.

        Args:
            timeout: seconds; afterwards ``is_alive()`` says whether it has ended.
        """
        super().join(timeout)
        if self.is_alive():
            return
        error, self._error = self._error, None
        if error is not None:
            self._said = f"{type(error).__name__}: {error}"
            try:
                raise error
            finally:
                del error
        if self._said:
            raise RuntimeError(f"{self.name} was ended by {self._said}; an earlier join raised it")


def _let_go(error: BaseException) -> None:
    """Of the locals in the frames that it, and what it came behind, has passed."""
    left: list[BaseException | None] = [error]
    known = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]
