"""Defers Ctrl-C while a call has submitted only part of its work."""

from __future__ import annotations

# `signal.signal` turns numbers into enums first: 2.4 us instead of 0.15 us (CPython 3.11, 2026-11).
import _signal  # type: ignore[import-not-found]
import threading
import time
from signal import SIGINT
from types import FrameType
from typing import Any

_HELD_SECONDS = 1.0


class DeferInterrupts:
    """Context manager: handles Ctrl-C only when the block ends.

    Blocks nest; the outermost one defers. At its end the previous SIGINT handler is called;
    Python's default handler raises KeyboardInterrupt. The block does nothing in threads other than
    the main thread, which do not handle signals, or if SIGINT has no Python handler.

    A block must not wait for anything but locks. If it hangs, another Ctrl-C a second or more after
    the first one is handled at once.
    """

    __slots__ = ("_handler", "_since")

    def __enter__(self) -> None:
        self._handler: Any = None
        self._since: float | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        handler = _signal.getsignal(SIGINT)
        if callable(handler) and type(handler) is not DeferInterrupts:
            self._handler = handler  # before `signal`: afterwards Ctrl-C calls this object
            _signal.signal(SIGINT, self)

    def __exit__(self, *error: object) -> None:
        if self._handler is None:
            return
        if _signal.getsignal(SIGINT) is self:  # else the block has set another handler
            _signal.signal(SIGINT, self._handler)
        if self._since is not None:
            self._handler(SIGINT, None)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGINT inside the block."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since >= _HELD_SECONDS:
            self._since = None
            self._handler(number, frame)
