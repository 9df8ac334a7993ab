"""Threads of AGN workers: registers them, waits for all, and records failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, Self

from gradreduce.device import MeshState, Waiters
from gradreduce.errors import DeadlineExceededError, listed, log_warning


class Registry:
    """The workers of a center that have begun, ended and failed.

    Args:
        mesh_state: the ``MeshState`` of the center's devices.
        of_rounds: the workers that wait for a round; they look again when a worker has ended.

    Attributes:
        failed: task indices of the workers that an exception ended, in the order of the exceptions.
    """

    def __init__(self, mesh_state: MeshState, of_rounds: Waiters) -> None:
        self._of_rounds = of_rounds
        self.failed: dict[int, None] = {}
        self._mesh_state = mesh_state
        self._mutex = threading.RLock()
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._waiters = Waiters(self._mutex)

    @property
    def lock(self) -> threading.RLock:
        """The lock; raises ``BackendUnavailableError`` in a forked child."""
        self._mesh_state.check_process()
        return self._mutex

    def list_begun(self) -> list[int]:
        """Returns the task indices of the workers of this round."""
        with self.lock:
            return sorted(self._begun)

    def list_failed(self) -> list[int]:
        """Returns ``failed``."""
        with self.lock:
            return list(self.failed)

    def begin(self, task_index: int) -> None:
        """Registers a worker, and removes it from ``failed``."""
        with self.lock:
            self._begun.add(task_index)
            self._ended.discard(task_index)
            self.clear_failure(task_index)
            self._waiters.notify()

    def end(self, task_index: int) -> None:
        """Unregisters a worker. After all have ended, workers that begin form a new round."""
        with self.lock:
            self._ended.add(task_index)
            if self._ended >= self._begun:  # new sets, because waiters still read the old ones
                self._begun, self._ended = set(), set()
        self._of_rounds.wake()

    def save(self) -> dict[str, list[int]]:
        """Returns the workers of this round, for a snapshot."""
        with self.lock:
            return {"begun": sorted(self._begun), "ended": sorted(self._ended)}

    def load(self, begun: Sequence[int], ended: Sequence[int]) -> None:
        """Restores what ``save`` has returned."""
        with self.lock:
            self._begun, self._ended = set(begun), set(ended)

    def num_ended(self) -> int:
        """Returns the number of workers of this round that have ended."""
        with self.lock:
            return len(self._ended)

    def clear_failure(self, task_index: int) -> None:
        """Removes a worker from ``failed``."""
        with self.lock:
            self.failed.pop(task_index, None)

    def mark_failed(self, task_index: int, error: BaseException) -> None:
        """Records that an exception ended a worker, and logs one warning."""
        with self.lock:
            if task_index in self.failed:
                return
            self.failed[task_index] = None
        self.end(task_index)
        log_warning(
            "gradreduce.agn",
            "worker %d failed, the other workers continue: %s: %s",
            # As text, because a handler may keep the record, and an error refers to its frames.
            task_index, type(error).__name__, str(error),
        )  # fmt: skip

    def wait_for(self, num_worker: int, timeout: float) -> None:
        """Blocks until ``num_worker`` workers have begun; workers that failed later count too.

        Raises:
            DeadlineExceededError: some workers are missing; the message lists them.
        """
        with self.lock:
            here = self._begun
        end = time.monotonic() + timeout
        self._waiters.until(
            lambda: len(here) >= num_worker or time.monotonic() >= end,
            lambda: max(0.0, end - time.monotonic()),
        )
        with self.lock:
            check_begun(sorted(here), num_worker, timeout)


def check_begun(begun: Sequence[int], num_worker: int, timeout: float) -> None:
    """Raises ``DeadlineExceededError`` if less than ``num_worker`` workers have begun."""
    if len(begun) < num_worker:
        missing = [task for task in range(num_worker) if task not in begun]
        raise DeadlineExceededError(
            f"after {timeout} s {len(begun)} of {num_worker} workers have started, "
            f"[{listed(begun)}]; {num_worker - len(begun)} of [{listed(missing)}] are missing"
        )


class WorkerThread(threading.Thread):
    """A thread whose ``join`` raises the exception that ended it.

    After it has ended, it does not keep objects of the training alive.

    Args:
        task_index: the number of the worker.
        work: the function to run.
        registry: records the exception if ``work`` raises.
    """

    def __init__(self, task_index: int, work: Callable[[], object], registry: Registry) -> None:
        super().__init__(target=work, name=f"agn-worker-{task_index}", daemon=True)
        self._task, self._registry = task_index, registry
        self._error: BaseException | None = None
        self._said = ""  # text of the exception that join() has raised

    def run(self) -> None:
        """Runs the worker's function."""
        try:
            super().run()
        except BaseException as error:  # join() raises it
            self._error = error
            self._registry.mark_failed(self._task, error)
            _clear_frames(error)

    def join(self, timeout: float | None = None) -> None:
        """Waits until the worker has ended, and raises the exception that ended it.

        The first call raises that exception and drops it, because its traceback keeps frames of the
        caller alive. Later calls raise a ``RuntimeError`` with its text.

        Args:
            timeout: seconds to wait; None without limit. After the call, ``is_alive()`` says
                whether the worker is still running.
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
            raise RuntimeError(
                f"{self.name} failed with {self._said}; an earlier join() raised that exception"
            )


def _clear_frames(error: BaseException) -> None:
    """Clears the frames in the tracebacks of an error, its causes and contexts."""
    left: list[BaseException | None] = [error]
    known = set()
    while left:
        current = left.pop()
        if current is not None and id(current) not in known:
            known.add(id(current))
            clear_frames(current.__traceback__)
            left += [current.__cause__, current.__context__]


@dataclass(frozen=True)
class AGNHook:
    """Context manager for a worker's training; registers the worker with the center.

    Entering calls ``begin`` and ``after_create_session``, leaving calls ``end``. Exceptions
    propagate, and the center adds the worker to its ``failed_workers``.

    The fields are the registry of the center, the function that copies the center to the worker,
    the worker's task index, the number of workers to wait for, and the seconds to wait (None: do
    not wait).
    """

    _registry: Registry
    _start: Callable[[], None]
    _task: int
    _num_worker: int
    _timeout: float | None

    def begin(self) -> None:
        """Registers the worker with the center."""
        self._registry.begin(self._task)

    def after_create_session(self, session: Any = None, coord: Any = None) -> None:
        """Waits for the other workers if a timeout was set, and copies the center.

        Args:
            session: ignored; an argument of TensorFlow.
            coord: ignored; an argument of TensorFlow.

        Raises:
            DeadlineExceededError: fewer than ``num_worker`` workers have started in time; the
                message lists the missing ones.
        """
        if self._timeout is not None:
            self._registry.wait_for(self._num_worker, self._timeout)
        self._start()

    def end(self, session: Any = None) -> None:
        """Unregisters the worker. After all have ended, workers that begin form a new training.

        Args:
            session: ignored; an argument of TensorFlow.
        """
        self._registry.end(self._task)

    def __enter__(self) -> Self:
        self.begin()
        try:
            self.after_create_session()
        except BaseException as error:
            self._registry.mark_failed(self._task, error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._registry.mark_failed(self._task, error)
        self.end()
