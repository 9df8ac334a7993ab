"""Threads that act as processes: each has its own mesh, and messages go through queues."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce.comm.process_group import ProcessError, ProcessGroup
from gradreduce.device.processes import Message


class SharedQueues:
    """The queues that the groups of all threads share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: dict[tuple[int, int, int], SimpleQueue[np.ndarray]] = defaultdict(
            SimpleQueue
        )
        self.notices: dict[tuple[int, str], str] = {}


class ThreadGroup(ProcessGroup):
    """A group whose processes are threads of this one.

    Attributes:
        sent: bytes sent to each other process.
    """

    def __init__(
        self,
        post: SharedQueues,
        rank: int,
        size: int,
        timeout: float = 60.0,
        gpu_library: str = "host",
    ) -> None:
        super().__init__(rank, size, timeout)
        self.gpu_library = gpu_library
        self._post = post
        self.sent: dict[int, int] = defaultdict(int)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        end = time.monotonic() + seconds
        for rank, array in sends:
            self.sent[rank] += array.nbytes
            with self._post.lock:
                queue = self._post.messages[self.rank, rank, tag]
            queue.put(array.copy())
        for rank, array in receives:
            with self._post.lock:
                queue = self._post.messages[rank, self.rank, tag]
            came = self._next(queue, rank, end)
            if came is None:
                raise ProcessError(rank, f"did not answer within {seconds:g} s")
            assert came.size == array.size, "the processes do not agree in the size of a message"
            array[...] = came

    def _next(self, queue: SimpleQueue[np.ndarray], rank: int, end: float) -> np.ndarray | None:
        """The next message; None if it has not come in time or cannot come."""
        while True:
            is_last = self.will_not_come(rank) or time.monotonic() >= end
            with suppress(Empty):
                return queue.get(timeout=0.02) if not is_last else queue.get_nowait()
            if is_last:
                return None

    def post(self, key: str, text: str) -> None:
        self._post.notices[self.rank, key] = text

    def read(self, rank: int, key: str, seconds: float) -> str | None:
        end = time.monotonic() + seconds
        while (found := self._post.notices.get((rank, key))) is None and time.monotonic() < end:
            threading.Event().wait(1e-4)
        return found


def run_processes(
    size: int, work: Callable[[ProcessGroup], Any], timeout: float = 60.0, **options: Any
) -> list[Any]:
    """Runs ``work`` in one thread for each process; returns the results by rank.

    Args:
        size: the number of processes.
        work: called in each thread with the group of its process.
        timeout: the timeout of the groups.
        options: arguments of ``ThreadGroup``.

    Raises:
        The error of the first process that failed.
    """
    post = SharedQueues()
    groups = [ThreadGroup(post, rank, size, timeout, **options) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, group) for group in groups]
        return [future.result(timeout=120) for future in futures]


def run_replicas(
    counts: Sequence[int],
    work: Callable[[gr.Mesh, range], Any],
    placement: Sequence[int] | None = None,
    **options: Any,
) -> list[Any]:
    """Runs ``work(mesh, replicas)`` in each process; with one process without a group.

    Args:
        counts: the number of replicas of each process.
        work: called with the mesh of a process, and the numbers of its replicas.
        placement: ``devices`` of the mesh of a single process; default: ``counts``.
        options: arguments of ``open_mesh``.
    """
    firsts = [sum(counts[:rank]) for rank in range(len(counts) + 1)]

    def run(group: ProcessGroup | None) -> Any:
        rank = 0 if group is None else group.rank
        process = {} if group is None else {"process_group": group}
        devices, options_here = placement or counts[rank], {"strict": True, **process, **options}
        with gr.open_mesh(devices, backend="sim", **options_here) as mesh:
            return work(mesh, range(firsts[rank], firsts[rank + 1]))

    return [run(None)] if len(counts) == 1 else run_processes(len(counts), run)
