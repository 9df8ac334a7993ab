"""Synchronizes a public call with its caller's streams, once per device and direction.

This module knows stream handles and devices, but no arrays.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from types import FrameType
from typing import Literal, ParamSpec, TypeVar

from gradreduce.device import Block, Device, FreedBlock, MeshState, Stream, handle_of
from gradreduce.errors import BackendUnavailableError, CollectiveError

_P = ParamSpec("_P")
_R = TypeVar("_R")
OrderStep = Literal["check", "enter", "leave"]  # see ``is_first``
_StreamPlace = tuple[
    MeshState, int, int
]  # a GPU of a mesh, and the handle of a caller's stream there


class _Scope:
    """State of the outermost ``StreamScope`` of a thread.

    Attributes:
        done: the steps that were done with each stream; see ``is_first``.
        inputs: the current streams of the libraries whose arrays were passed in: a device of the
            GPU, the stream (kept alive until it waits for the call), and whether an array was read
            already.
        frame: the frame in which the scope was opened.
        read: the blocks of callers' arrays that are read.
    """

    __slots__ = ("done", "frame", "inputs", "read")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.done: set[tuple[OrderStep, _StreamPlace]] = set()
        self.inputs: dict[_StreamPlace, tuple[Device, Stream, bool]] = {}
        self.read: set[FreedBlock] = set()


class _ThreadScopes(threading.local):
    """This thread's open scope, and the scope that a ``SuspendedScope`` has suspended."""

    scope: _Scope | None = None
    suspended: _Scope | None = None


_thread = _ThreadScopes()


class StreamScope:
    """Context manager: synchronizes each caller's stream once per device and direction.

    Contexts nest; the outermost counts. A wait between streams takes two driver calls, and a call
    may have hundreds of arrays. One wait is enough for all inputs, because they existed before the
    call began. One wait is enough for all outputs, if all work is queued before the first output is
    returned. So no launch may come between two outputs, and the caller's own code may run only in a
    ``SuspendedScope``. JAX arrays are an exception: only sharing an array makes a stream wait.

    The caller may overwrite inputs as soon as the call has returned: each stream of an input that
    has no output waits for our queue at the end. So all work that reads inputs must be queued
    inside.

    Args:
        reads: False if arrays are only stored for a later call; then only copied arrays count as
            read.
    """

    def __init__(self, *, reads: bool = True) -> None:
        self._reads = reads

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates a function so that each call has its own scope."""

        @wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with StreamScope(reads=self._reads):
                return function(*args, **kwargs)

        return wrapper

    def __enter__(self) -> None:
        self._outer = _open_scope()
        if self._outer is None:
            _thread.scope = _Scope(sys._getframe(1))

    def __exit__(self, *error: object) -> None:
        if self._outer is not None:
            return
        scope, _thread.scope = _thread.scope, None
        if scope is not None and scope.inputs:
            _release_inputs(scope, self._reads)


def _open_scope() -> _Scope | None:
    """Returns the scope of this thread; None if Ctrl-C prevented its closing.

    The waits of such a scope must not count for a later call.
    """
    scope = _thread.scope
    frame = sys._getframe(1) if scope else None
    while scope and frame:
        if frame is scope.frame:
            return scope
        frame = frame.f_back
    return None


class SuspendedScope:
    """Suspends the ``StreamScope`` while the caller's own code runs.

    That code may queue more work on its streams, and may read outputs. Its calls open scopes of
    their own. Inputs that it passes outside of such a call are released by the suspended scope.
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


def is_first(step: OrderStep, device: Device, stream: Stream) -> bool:
    """Whether this call does a step with ``stream`` on the GPU for the first time.

    Args:
        step: ``"check"``: look whether the stream captures a graph; ``"enter"``: our queue waits
            for the stream; ``"leave"``: the stream waits for our queue.
        device: any device of that GPU.
        stream: the caller's stream.
    """
    scope = _open_scope()
    if scope is None:
        return True
    key = (step, _place(device, stream))
    if key in scope.done:
        return False
    scope.done.add(key)
    return True


def record_input(device: Device, stream: Stream, *, read: bool = False) -> None:
    """Records that this call reads an array of ``stream``; ``read``: has copied it already."""
    scope = _thread.scope or _thread.suspended
    if scope is not None:
        place = _place(device, stream)
        *first, was_read = scope.inputs.get(place, (device, stream, False))
        scope.inputs[place] = (*first, read or was_read)


def _place(device: Device, stream: Stream) -> _StreamPlace:
    return device.mesh_state, device.physical, handle_of(stream)


def keep_alive(blocks: Iterable[Block]) -> None:
    """Keeps callers' arrays alive until their streams wait for this call."""
    scope = _thread.scope or _thread.suspended
    if scope is None:
        return
    for block in blocks:
        if not block.owned:
            block.remains.raw = block.raw
            scope.read.add(block.remains)


def keep_alive_longer(block: Block) -> None:
    """Keeps a caller's array alive beyond this call, because later work reads it too."""
    if _thread.scope is not None and hasattr(block, "remains"):
        _thread.scope.read.discard(block.remains)


def release_inputs() -> None:
    """Makes the streams of all inputs wait for the queued work that reads them.

    Used in a block that defers Ctrl-C, because Ctrl-C may come after it and before the call ends.
    """
    scope = _thread.scope
    if scope is not None and scope.inputs:
        _release_inputs(scope, True)
        scope.inputs.clear()
        scope.read.clear()


def _release_inputs(scope: _Scope, reads: bool) -> None:
    """Makes the streams of all inputs wait for the queues that read them.

    Afterwards only their blocks keep the arrays alive. Otherwise one step's gradients would stay in
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
