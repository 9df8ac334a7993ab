"""Runs signal handlers at chosen points of a call, where CPython may run them."""

from __future__ import annotations

import dis
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, TracebackType
from typing import Any

# CPython (3.11 to 3.13) runs signal handlers after these instructions, in the main thread.
_CHECKED = frozenset(
    number
    for number, name in enumerate(dis.opname)
    if name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME")
    or ("JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name)
)


def _ends_alike(frame: FrameType, before: int) -> bool:
    """Whether errors of this instruction and of the previous one have the same handler.

    A signal handler's error belongs to the previous instruction: after ``return f()`` in a
    ``with``, for example, that is in the block, while this instruction may be outside.
    """
    return _handled_at(frame.f_code, before) == _handled_at(frame.f_code, frame.f_lasti)


@cache
def _handled_at(code: CodeType, offset: int) -> int | None:
    """The offset of the handler for an error of the instruction at ``offset``, or None."""
    entries = dis._parse_exception_table(code)
    return next((each.target for each in entries if each.start <= offset < each.end), None)


def raise_interrupt() -> None:
    """Acts like the handler of Ctrl-C."""
    raise KeyboardInterrupt


def ctrl_c() -> None:
    """Sends the signal of Ctrl-C; when this returns, the current handler has run."""
    signal.raise_signal(signal.SIGINT)


@contextmanager
def alarm(seconds: float, handler: Any = signal.default_int_handler) -> Iterator[None]:
    """Calls a handler in the main thread if the block takes longer; by default that of Ctrl-C."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class SignalInjection:
    """Calls ``handler`` inside the block at chosen points of this thread, the same every time.

    Args:
        place: the number of the first point, from 1 on; 0 for none.
        handler: called at the point, without tracing. It is not called again after it has raised.
        every: the distance to the next point; 0 if there is no next point.

    Attributes:
        points: the number of points until the last call of the handler, or until the end.
    """

    def __init__(self, place: int, handler: Callable[[], object], every: int = 0) -> None:
        self._place = place
        self._handler = handler
        self._every = every
        self._codes: dict[CodeType, bytes] = {}
        self.points = 0

    def __enter__(self) -> SignalInjection:
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # a collection would add the points of finalizers, at some calls
        sys._getframe().f_trace_opcodes = True  # CPython 3.12 looks in `settrace` for any
        sys.settrace(self._enter_frame)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        code = self._codes.setdefault(frame.f_code, frame.f_code.co_code)
        last = -1

        def passed(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                before, last = last, frame.f_lasti
                if before >= 0 and code[before] in _CHECKED and _ends_alike(frame, before):
                    self.points += 1
                    if self.points == self._place:
                        self._place += self._every
                        self._handler()
            return passed

        frame.f_trace, frame.f_trace_lines = passed, False
        frame.f_trace_opcodes = True  # CPython 3.13 looks here for a trace
        return passed


def num_points_of(call: Callable[[], object]) -> int:
    with SignalInjection(0, raise_interrupt) as injection:
        call()
    return injection.points


def interrupted_at(place: int, call: Callable[[], object]) -> tuple[bool, int]:
    """Makes a call and presses Ctrl-C at one point of it.

    Returns:
        Whether KeyboardInterrupt was raised, also if a finalizer swallowed it; and the number of
        points.
    """
    hook, unheard, is_raised = sys.unraisablehook, [], False
    sys.unraisablehook = lambda raised: unheard.append(raised.exc_type)
    injection = SignalInjection(place, ctrl_c)
    try:
        with injection:
            call()
    except KeyboardInterrupt:
        is_raised = True
    finally:
        sys.unraisablehook = hook
    return is_raised or KeyboardInterrupt in unheard, injection.points
