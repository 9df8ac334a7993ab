"""Orders one public call with its caller's streams, each stream once per device and direction.

Knows handles of streams and the devices whose queues they are ordered with, but no arrays.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import ParamSpec, TypeVar

from gradreduce.device import Block, Device, FreedBlock, Stream, handle_of
from gradreduce.device.mesh_state import MeshState
from gradreduce.errors import BackendUnavailableError, CollectiveError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Place = tuple[Device, int]  # whose compute queue, and the handle of a caller's stream


class _Scope:
    """State of the outermost ``StreamScope`` of a thread.

    Attributes:
        checked: GPUs, and streams there that are not capturing a CUDA graph.
        fenced: with which streams, and whether they wait for us (True) or we for them.
        inputs: the current streams of the libraries whose arrays were passed in: each stream, which
            must not end before it has been told to wait, and whether an array was read already.
        frame: in which it was opened.
        read: callers' arrays that were passed in to be read, or were read.
    """

    __slots__ = ("checked", "fenced", "frame", "inputs", "read")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.checked: set[tuple[int, Stream | None]] = set()
        self.fenced: set[tuple[bool, Device, int]] = set()
        self.inputs: dict[_Place, tuple[Stream, bool]] = {}
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
            self._scope.fenced.clear()
            self._scope.checked.clear()
            _thread.suspended, _thread.scope = self._outer, self._scope


def unsynchronized(device: Device, stream: Stream | None, *, leaving: bool) -> Stream | None:
    """Returns ``stream``, or None if this call has synchronized with it already."""
    scope = _thread.scope
    if scope is None or stream is None:
        return stream
    index = (leaving, device, handle_of(stream))
    if index in scope.fenced:
        return None
    scope.fenced.add(index)
    return stream


def unchecked(device: Device, stream: Stream | None) -> bool:
    """Whether this call has not checked ``stream`` for graph capture yet; then it should."""
    scope = _thread.scope
    if scope is None:
        return True
    index = (device.physical, stream)
    if index in scope.checked:
        return False
    scope.checked.add(index)
    return True


def record_input(device: Device, stream: Stream, *, read: bool = False) -> None:
    """Notes that this call reads an array of ``stream``, or has ``read`` it (copied) already."""
    scope = _thread.scope or _thread.suspended
    if scope is not None:
        index = (device, handle_of(stream))
        first, was_read = scope.inputs.get(index, (stream, False))
        scope.inputs[index] = (first, read or was_read)


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
    sharing: dict[tuple[MeshState, int, int], tuple[Stream, list[Device]]] = {}
    for (device, handle), (stream, read) in scope.inputs.items():
        if not (reads or read) or (True, device, handle) in scope.fenced:
            continue
        if device.mesh_state.capture is None:  # else each call of what is captured does it
            gpu = (device.mesh_state, device.physical, handle)
            sharing.setdefault(gpu, (stream, []))[1].append(device)
    for stream, devices in sharing.values():
        # A device that has failed or hangs cannot make its readers wait.
        try:
            devices[0].block_stream(stream)
        except (BackendUnavailableError, CollectiveError):
            waiting = False
    for freed in scope.read if waiting else ():
        freed.raw = None
