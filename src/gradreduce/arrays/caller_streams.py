"""Orders one public call with its caller's streams, each stream once per device and direction.

Knows handles of streams and the devices whose queues they are ordered with, but no arrays.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Literal, ParamSpec, TypeVar

from gradreduce.device import Block, Device, FreedBlock, Stream, handle_of
from gradreduce.device.mesh_state import MeshState
from gradreduce.errors import BackendUnavailableError, CollectiveError

_P = ParamSpec("_P")
_R = TypeVar("_R")
Step = Literal["check", "enter", "leave"]  # see ``is_first``
_Place = tuple[MeshState, int, int]  # a GPU of a mesh, and the handle of a caller's stream there


class _Scope:
    """State of the outermost ``StreamScope`` of a thread.

    Attributes:
        done: what was done with which streams; see ``is_first``.
        inputs: the current streams of the libraries whose arrays were passed in: a device of the
            GPU, the stream, which must not end before it has been told to wait, and whether an
            array was read already.
        frame: in which it was opened.
        read: callers' arrays that were passed in to be read, or were read.
    """

    __slots__ = ("done", "frame", "inputs", "read")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.done: set[tuple[Step, _Place]] = set()
        self.inputs: dict[_Place, tuple[Device, Stream, bool]] = {}
        self.read: set[FreedBlock] = set()


class _ThreadScopes(threading.local):
    """This thread's open scope, and the one that a ``SuspendedScope`` has suspended."""

    scope: _Scope | None = None
    suspended: _Scope | None = None


_thread = _ThreadScopes()


class StreamScope:
    """Context in which each caller's stream is synchronized once per device and direction.

    Contexts nest; the outermost counts. A wait between streams is two driver calls, and a call may
    have hundreds of arrays. One wait serves all inputs, because they existed before the call
    began, and one all outputs, if all work is queued before the first is returned: so no launch
    belongs between two outputs, and the caller's own code inside only in a ``SuspendedScope``.
    Not so where only the sharing itself makes a stream wait (JAX's).

    The caller may overwrite inputs as soon as the call has returned: each stream that has an input
    and no output waits for our queue at the end. So everything that reads belongs inside.

    Args:
        reads: False where arrays are only stored, to be read by a later call: only those that had
            to be copied were read.
    """

    def __init__(self, *, reads: bool = True) -> None:
        self._reads = reads

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates a function, each call of which gets a scope of its own."""
        reads = self._reads

        @wraps(function)
        def scoped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with StreamScope(reads=reads):
                return function(*args, **kwargs)

        return scoped

    def __enter__(self) -> None:
        self._outer, frame = _thread.scope, sys._getframe(1)
        if self._outer is None or not _is_open(self._outer, frame):
            self._outer, _thread.scope = None, _Scope(frame)

    def __exit__(self, *error: object) -> None:
        if self._outer is not None:
            return
        scope, _thread.scope = _thread.scope, None
        if scope is not None and scope.inputs:
            _release_inputs(scope, self._reads)


def _is_open(scope: _Scope, frame: FrameType | None) -> bool:
    """Whether a scope is in use; False if Ctrl-C kept it from being closed.

    What it synchronized does not count for a later call.
    """
    while frame is not None:
        if frame is scope.frame:
            return True
        frame = frame.f_back
    return False


class SuspendedScope:
    """Suspends the ``StreamScope`` around the caller's own code, whose calls open their own.

    That code may queue work on its streams that nothing waits for yet, and read outputs. Inputs
    that it passes outside a call of its own are released by the suspended scope.
    """

    def __enter__(self) -> None:
        self._outer = _thread.suspended
        self._scope = _thread.scope
        if self._scope is not None:
            _thread.suspended, _thread.scope = self._scope, None

    def __exit__(self, *error: object) -> None:
        if self._scope is not None:
            self._scope.done.clear()
            _thread.suspended, _thread.scope = self._outer, self._scope


def is_first(step: Step, device: Device, stream: Stream) -> bool:
    """Whether this call does a step with ``stream`` on the GPU for the first time.

    Args:
        step: ``"check"`` it for graph capture, ``"enter"``: our queue waits for it, or ``"leave"``:
            it waits for our queue.
        device: any of that GPU.
        stream: of the caller.
    """
    scope = _thread.scope
    if scope is None:
        return True
    key = (step, _place(device, stream))
    if key in scope.done:
        return False
    scope.done.add(key)
    return True


def record_input(device: Device, stream: Stream, *, read: bool = False) -> None:
    """Notes that this call reads an array of ``stream``, or has ``read`` it (copied) already."""
    scope = _thread.scope or _thread.suspended
    if scope is not None:
        place = _place(device, stream)
        *first, was_read = scope.inputs.get(place, (device, stream, False))
        scope.inputs[place] = (*first, read or was_read)


def _place(device: Device, stream: Stream) -> _Place:
    return device.mesh_state, device.physical, handle_of(stream)


def keep_alive(block: Block) -> None:
    """Keeps a caller's array alive until its stream waits for this call."""
    scope = _thread.scope or _thread.suspended
    if scope is not None and not block.owned:
        block.remains.raw = block.raw
        scope.read.add(block.remains)


def keep_alive_longer(block: Block) -> None:
    """Keeps a caller's array alive beyond this call, since later work reads it too."""
    if _thread.scope is not None and hasattr(block, "remains"):
        _thread.scope.read.discard(block.remains)


def release_inputs() -> None:
    """Makes the streams of all inputs wait for the queued work that reads them.

    For a block that defers Ctrl-C, since an interrupt after it may come before the call ends.
    """
    scope = _thread.scope
    if scope is not None and scope.inputs:
        _release_inputs(scope, True)
        scope.inputs.clear()
        scope.read.clear()


def _release_inputs(scope: _Scope, reads: bool) -> None:
    """Makes the streams of all inputs wait for the queues that read them.

    From then on only their blocks hold those arrays. Otherwise one step's gradients would stay in
    memory until the next call.
    """
    waiting = reads
    for place, (device, stream, read) in scope.inputs.items():
        if not (reads or read) or ("leave", place) in scope.done:
            continue
        # A device that has failed or hangs cannot make its readers wait.
        try:
            device.block_stream(stream)
        except (BackendUnavailableError, CollectiveError):
            waiting = False
    for freed in scope.read if waiting else ():
        freed.raw = None
