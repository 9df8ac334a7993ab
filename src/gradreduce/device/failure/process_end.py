"""Keeps threads out of libraries of C++ while the process ends.

The end of Python ends every daemon thread when it returns from a library. If the library is PyTorch
or gloo, this calls ``std::terminate``, which aborts the process.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from gradreduce.errors import CollectiveError

from .forks import after_fork

# Somewhat longer than an exchange needs to notice that the process ends.
_END_SECONDS = 3.0
# The threads that are inside a library, once for each call.
_inside: list[int] = []
_is_ending = [False]


def check_running() -> None:
    """Raises ``CollectiveError`` if the process ends."""
    if _is_ending[0]:
        raise CollectiveError("this process ends")


@contextmanager
def inside_library() -> Iterator[None]:
    """Context manager and decorator for calls that the end of the process must wait for.

    Raises:
        CollectiveError: the process ends already.
    """
    thread = get_ident()
    _inside.append(thread)  # first: the end of the process looks here after it has refused others
    try:
        check_running()
        yield
    finally:
        _inside.remove(thread)


def _await_threads() -> None:
    """Refuses further calls, and waits until no other thread is inside a library."""
    _is_ending[0] = True
    end = time.monotonic() + _END_SECONDS
    while set(_inside) - {get_ident()} and time.monotonic() < end:
        time.sleep(1e-3)


# Functions that are registered later are called earlier: they end what the threads wait for.
atexit.register(_await_threads)
after_fork(_inside.clear)
