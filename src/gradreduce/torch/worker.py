"""Runs reductions while ``backward`` continues: in a thread if there are several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch

from gradreduce.device import Done, Mesh, MeshState, ModuleLock, inside_library
from gradreduce.errors import CollectiveError, InvalidArgumentError


class Task:
    """A call that a worker runs.

    Attributes:
        error: what the call has raised; None: nothing so far.
    """

    def __init__(self, call: Callable[[], object], streams: list[Any]) -> None:
        self._call: Any = call
        self._streams = streams
        self._done = Done()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Runs the call, on the worker's streams."""
        try:
            with ExitStack() as stack:
                stack.enter_context(inside_library())
                for stream in self._streams:
                    stack.enter_context(torch.cuda.stream(stream))
                self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._call = None  # frees what the call refers to
            self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the call has returned, or so many seconds; returns whether it has.

        Raises the error of the call. Work that it has queued on GPUs may still run: see ``join``.
        """
        ended = self._done.wait(timeout)
        if self.error is not None:
            raise self.error
        return ended

    def join(self) -> None:
        """Makes PyTorch's current streams wait for the work that the call has queued."""
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


class BackwardWorker:
    """Runs calls one after the other, in the order of submission.

    On GPUs it uses its own streams.

    Args:
        in_thread: whether a thread runs the calls. If not, ``submit`` runs them, which is faster if
            they do not wait for other processes.
    """

    def __init__(self, *, in_thread: bool) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._tasks: SimpleQueue[Task | None] | None = None
        self._thread: Thread | None = None
        if in_thread:
            self._tasks = SimpleQueue()
            finalize(self, self._tasks.put, None)
            arguments = (self._tasks,)
            self._thread = Thread(target=_run, args=arguments, name="gradreduce.torch", daemon=True)
            self._thread.start()

    def submit(self, call: Callable[[], object], streams: Iterable[Any]) -> Task:
        """Submits a call. The thread itself, in a callback of a future, runs it at once.

        Args:
            call: the call; ``Task.wait`` raises its error.
            streams: one stream for each GPU whose tensors the call reads or writes. The call's work
                waits for the work that these streams have now.
        """
        own = []
        for stream in streams:
            if stream.device not in self._streams:
                self._streams[stream.device] = torch.cuda.Stream(stream.device)
            own.append(self._streams[stream.device])
            own[-1].wait_stream(stream)
        task = Task(call, own)
        if self._tasks is None or current_thread() is self._thread:
            task.run()
        else:
            self._tasks.put(task)
        return task


_workers: WeakKeyDictionary[MeshState, BackwardWorker] = WeakKeyDictionary()
_workers_lock = ModuleLock()


def worker_of(mesh: Mesh) -> BackwardWorker:
    """Returns the worker of a mesh.

    A mesh has one worker, because its processes must run their calls in the same order.
    """
    with _workers_lock.lock:
        worker = _workers.get(mesh.mesh_state)
        if worker is None:
            worker = _workers[mesh.mesh_state] = BackwardWorker(in_thread=mesh.num_processes > 1)
        return worker


def _run(tasks: SimpleQueue[Task | None]) -> None:
    """Runs tasks until it gets None, which the worker sends when it is freed."""
    while (task := tasks.get()) is not None:
        task.run()
        del task  # it refers to tensors


def with_name(error: Exception, bucket: str) -> Exception:
    """Adds the name of a bucket to an error; replaces errors of calls over processes."""
    if type(error) in (CollectiveError, InvalidArgumentError):
        return type(error)(f"{bucket}: {error}")
    error.add_note(f"It was about {bucket}.")
    return error
