"""A thread that reduces while ``backward`` goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize

import torch

from gradreduce.device.waiting import Done


class Task:
    """A call that a worker makes."""

    def __init__(self, call: Callable[[], object], streams: list[Any]) -> None:
        self._call: Callable[[], object] | None = call
        self._streams = streams
        self._done = Done()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call, on the worker's streams of its devices."""
        assert self._call is not None
        try:
            with ExitStack() as stack:
                for stream in self._streams:
                    stack.enter_context(torch.cuda.stream(stream))
                self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._call = None  # and what it holds
            self._done.set()

    def wait(self) -> None:
        """Waits until the call has returned; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Worker:
    """Makes calls in a thread of its own, one after the other, in the order of submission.

    On GPUs they run on streams of their own, behind what PyTorch's current streams hold at the
    submission.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._streams: dict[torch.device, Any] = {}
        finalize(self, self._tasks.put, None)
        Thread(target=_run, args=(self._tasks,), name="gradreduce.torch", daemon=True).start()

    def submit(self, call: Callable[[], object], devices: Iterable[torch.device]) -> Task:
        """Submits a call; returns at once.

        Args:
            call: made in the thread of the worker.
            devices: of the tensors that it reads or writes.
        """
        streams = []
        for device in devices:
            if device.type == "cuda":
                stream = self._stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                streams.append(stream)
        task = Task(call, streams)
        self._tasks.put(task)
        return task

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _run(tasks: SimpleQueue[Task | None]) -> None:
    """Runs tasks until a None comes; holds no worker, whose end sends the None."""
    while (task := tasks.get()) is not None:
        task.run()
        del task  # it holds tensors
