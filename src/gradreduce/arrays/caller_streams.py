"""What one public call fences with its caller's streams: each once, in, out and on leaving.

Knows handles of streams, and whose queue; never an array, nor the library that it is of.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ContextDecorator
from types import FrameType, TracebackType
from typing import Self

from gradreduce.device import Block, Device, FreedBlock, Stream, block_stream, handle_of
from gradreduce.errors import BackendUnavailableError, CollectiveError

__all__ = [
    "StreamScope",
    "SuspendedScope",
    "is_read",
    "is_read_later",
    "record_input",
    "release_inputs",
    "unchecked",
    "unfenced",
]

_Place = tuple[Device, int]  # whose compute queue, and the handle of a caller's stream


class _Scope:
    """Of the outermost ``StreamScope`` of a thread.

    Attributes:
        checked: GPUs, and streams there that are not capturing a CUDA graph.
        fenced: with which streams, and whether they wait for us (True) or we for them.
        lent: whose arrays came in, with what is current there: the stream, which must not end
            before it has been told to wait, and whether an array was read already.
        frame: in which it was opened.
        read: callers' arrays that came in to be read, or were read.
    """

    __slots__ = ("checked", "fenced", "frame", "lent", "read")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.checked: set[tuple[int, Stream | None]] = set()
        self.fenced: set[tuple[bool, Device, int]] = set()
        self.lent: dict[_Place, tuple[Stream, bool]] = {}
        self.read: set[FreedBlock] = set()


class _Mine(threading.local):
    """This thread's open scope, and that which an ``SuspendedScope`` has put away."""

    scope: _Scope | None = None
    suspended: _Scope | None = None


_mine = _Mine()


class StreamScope(ContextDecorator):
    """Inside, this thread fences each foreign stream once per device and direction; nests.

    A fence is two driver calls, and a call may bring hundreds of arrays. One serves those that
    come in, because all of them were given before the call began, and one those that go out, if
    all work is queued before the first leaves: so no launch belongs between two that go out, and
    the caller's own code inside only in an ``SuspendedScope``. Not so where only the sharing itself
    makes a stream wait (JAX's).

    The caller may overwrite what came in as soon as the call has returned: whichever stream lent
    an array, and was given none, waits on leaving for our queue. So whatever reads belongs inside.

    Args:
        reads: False for what takes arrays in, to be read by a later call: only those that had to
            be copied were read.
    """

    def __init__(self, *, reads: bool = True) -> None:
        self._reads = reads

    def _recreate_cm(self) -> Self:
        """One for each call of what it decorates, in each thread."""
        return type(self)(reads=self._reads)

    def __enter__(self) -> None:
        self._outer, frame = _mine.scope, sys._getframe(1)
        if self._outer is None or not _is_open(self._outer, frame):
            self._outer, _mine.scope = None, _Scope(frame)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._outer is not None:
            return
        scope, _mine.scope = _mine.scope, None
        if scope is not None and scope.lent:
            _release_inputs(scope, self._reads)


def _is_open(scope: _Scope, frame: FrameType | None) -> bool:
    """False for a scope that was never closed: Ctrl-C came in front of the first line that does.

    What it fenced is nothing to a later call.
    """
    while frame is not None:
        if frame is scope.frame:
            return True
        frame = frame.f_back
    return False


class SuspendedScope:
    """Inside a ``StreamScope``, around the caller's own code: its calls are calls by themselves.

    What it gave its streams meanwhile is not fenced yet, and it may have read what went out. What
    comes in inside, but not in a call of its own, is handed back by the call around it.
    """

    def __enter__(self) -> None:
        self._outer = _mine.suspended
        self._scope = _mine.scope
        if self._scope is not None:
            _mine.suspended, _mine.scope = self._scope, None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._scope is not None:
            self._scope.fenced.clear()
            _mine.suspended, _mine.scope = self._outer, self._scope


def unfenced(device: Device, stream: Stream | None, *, leaving: bool) -> Stream | None:
    """``stream``, or None if this call has fenced it already."""
    scope = _mine.scope
    if scope is None or stream is None:
        return stream
    index = (leaving, device, handle_of(stream))
    if index in scope.fenced:
        return None
    scope.fenced.add(index)
    return stream


def unchecked(device: Device, stream: Stream | None) -> bool:
    """Whether this call asks about ``stream`` for the first time: its caller checks it then."""
    scope = _mine.scope
    if scope is None:
        return True
    index = (device.physical, stream)
    if index in scope.checked:
        return False
    scope.checked.add(index)
    return True


def record_input(device: Device, stream: Stream, *, read: bool = False) -> None:
    """``stream`` lent an array to ``device`` that this call reads, or has ``read`` (a copy)."""
    scope = _mine.scope or _mine.suspended
    if scope is not None:
        index = (device, handle_of(stream))
        first, was_read = scope.lent.get(index, (stream, False))
        scope.lent[index] = (first, read or was_read)


def is_read(block: Block) -> None:
    """This call reads a caller's array: it is held until its stream is told to wait for us."""
    scope = _mine.scope or _mine.suspended
    if scope is not None and not block.owned:
        block.remains.raw = block.raw
        scope.read.add(block.remains)


def is_read_later(block: Block) -> None:
    """Work after this call reads a caller's array too: it is held until that work is over."""
    if _mine.scope is not None and hasattr(block, "remains"):
        _mine.scope.read.discard(block.remains)


def release_inputs() -> None:
    """All that this call reads is queued: the streams that lent it wait from now on.

    For a block that defers Ctrl-C, behind which one may come in front of the end of the call.
    """
    scope = _mine.scope
    if scope is not None and scope.lent:
        _release_inputs(scope, True)
        scope.lent.clear()
        scope.read.clear()


def _release_inputs(scope: _Scope, reads: bool) -> None:
    """The streams that lent arrays wait for the queues that read them.

    So nothing but their blocks holds those arrays any more: until the next call they would be one
    step's gradients too many.
    """
    told = reads
    for (device, handle), (stream, read) in scope.lent.items():
        if not (reads or read) or (True, device, handle) in scope.fenced:
            continue
        if device.mesh_state.capture is None:  # else each call of what is captured does it
            # On a device that is lost, or never comes to an end, nothing can be in time.
            try:
                block_stream(device, stream)
            except (BackendUnavailableError, CollectiveError):
                told = False
    for freed in scope.read if told else ():
        freed.raw = None
