"""Operations of devices that fail when a test wants it, and threads that switch often."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

METHODS = ("_allocate", "_upload", "_copy", "_launch")


class InjectedError(RuntimeError):
    """The failure that a test plants."""


class Failing:
    """Wraps operations, the n-th of which fails, from 1 on; ``tried`` has the names of all."""

    def __init__(self, number: int, times: int = 1) -> None:
        self.numbers, self.tried = range(number, number + times), list[str]()

    def __call__(self, real: Any, name: str, error: Any = InjectedError) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.tried.append(name)
            if len(self.tried) in self.numbers:
                raise error(name)
            return real(*args, **options)

        return run


@contextmanager
def failing_at(
    devices: Iterable[Any], number: int, methods: Iterable[str] = METHODS, times: int = 1
) -> Iterator[Failing]:
    """Makes the n-th of these operations fail once, or ``times`` times."""
    failing = Failing(number, times)
    with pytest.MonkeyPatch.context() as patch:
        for device in devices:
            for method in methods:
                patch.setattr(device, method, failing(getattr(device, method), method[1:]))
        yield failing


@contextmanager
def fast_thread_switching() -> Iterator[None]:
    """Makes Python switch threads a thousand times more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
