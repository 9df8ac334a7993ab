"""Ctrl-C at the n-th place of a call at which CPython looks for signals.

The interpreter looks where a function begins and behind a call; elsewhere no signal handler runs.
So ``with lock:`` is safe, and ``lock.acquire()`` followed by ``try:`` is not.
"""

from __future__ import annotations

import dis
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions in front of which a signal handler may run."""
    found, looks = set(), False
    for instruction in dis.get_instructions(code):
        if looks:
            found.add(instruction.offset)
        looks = instruction.opname.startswith(("CALL", "RESUME"))
    return frozenset(found)


class _Presser:
    def __init__(self, press_at: int, press: Callable[[], None]) -> None:
        self.num_places, self._press_at, self._press = 0, press_at, press

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._look

    def _look(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self.num_places += 1
            if self.num_places == self._press_at:
                self._press()
        return self._look


def ctrl_c() -> None:
    """As the key does; the handler runs before this returns."""
    signal.raise_signal(signal.SIGINT)


def pressed_at(
    place: int, call: Callable[[], object], press: Callable[[], None] = ctrl_c
) -> tuple[bool, int]:
    """Makes a call in which Ctrl-C is pressed at one place.

    Args:
        place: counted from 1; 0 is nowhere.
        call: what is interrupted.
        press: what is done there.

    Returns:
        Whether the call raised KeyboardInterrupt (or CPython dropped it, where it came in a
        ``__del__``), and how many places it has come by.
    """
    presser, before, dropped = _Presser(place, press), sys.gettrace(), []
    hook, interrupted = sys.unraisablehook, False
    sys.unraisablehook = lambda unraised: dropped.append(unraised.exc_type)
    sys.settrace(presser.trace)
    try:
        call()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook
    return interrupted or KeyboardInterrupt in dropped, presser.num_places


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Inside, SIGINT has this handler."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
