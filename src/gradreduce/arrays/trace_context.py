"""Which loss a thread is computing, and how it reads Variables; never differentiates.

NumPy's functions find a traced value by NumPy's own protocols. Functions of ours that may be given
one (``gr.add_n``) are ``traceable``: they hand a call over in the same way. NumPy hands over too
what is to be made beside one, as ``np.asarray(x, like=variable)``: ``made_like``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from gradreduce.device import Buffer, Device

__all__ = [
    "Reader",
    "Traceable",
    "check_unread",
    "current_reader",
    "holds_traceable",
    "made_like",
    "reading_by",
    "traceable",
]

_CREATING = {
    "arange", "array", "asanyarray", "asarray", "ascontiguousarray", "empty", "eye", "full",
    "identity", "ones", "tri", "zeros",
}  # fmt: skip

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Reader(Protocol):
    """What a loss reads Variables by.

    Attributes:
        home: of the first copy that was read; where arrays of the loss lie that are no Buffers.
    """

    home: Device | None

    def read(self, variable: Any, copy: Buffer, output_type: str | None) -> Any:
        """The value of one copy of a Variable, as what the loss differentiates by."""

    def check_unread(self, variables: Iterable[Any]) -> None:
        """See the function of that name."""


# Of a thread or, within one, of an asyncio task: several losses may be computed at once.
_reader: ContextVar[Reader | None] = ContextVar("gradreduce_reader", default=None)


def current_reader() -> Reader | None:
    """That of the innermost loss which this thread is computing; None outside any."""
    return _reader.get()


def check_unread(variables: Iterable[Any]) -> None:
    """Raises if one is written inside a loss that has read it: the tape holds its memory.

    Raises:
        RuntimeError: which.
    """
    reader = _reader.get()
    if reader is not None:
        reader.check_unread(variables)


@contextmanager
def reading_by(reader: Reader | None) -> Iterator[None]:
    """Inside, this thread's Variables are read by ``reader``; whatever comes, not afterwards."""
    before = _reader.get()
    _reader.set(reader)
    try:
        yield
    finally:
        _reader.set(before)


class Traceable:
    """What answers for itself when a ``traceable`` function is given it: see NumPy's NEP 18."""

    __slots__ = ()

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Does the call."""
        raise NotImplementedError


def holds_traceable(given: Any) -> bool:
    """Whether an argument is ``Traceable``, or a list or tuple of which an element is."""
    within = given if isinstance(given, list | tuple) else (given,)
    return any(isinstance(each, Traceable) for each in within)


def made_like(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], array: Any) -> Any:
    """What NumPy's ``function`` makes beside a plain ``array``, of its library.

    For a call that NumPy hands over because of ``like=``, which it has taken away: nothing among
    its arguments is ``Traceable``.

    Raises:
        NotImplementedError: it has no ``like=``; a Traceable lies deeper in its arguments.
    """
    name = function.__name__
    if name not in _CREATING:
        raise NotImplementedError(
            f"np.{name} of nested lists has no rule of differentiation here; use np.stack and "
            "np.concatenate, or return a PyTorch tensor from the loss: then PyTorch differentiates"
        )
    if hasattr(array, "__array_function__"):
        kwargs = {**kwargs, "like": array}
    return function(*args, **kwargs)  # beside one of NumPy's numbers an array is NumPy's anyway


def traceable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, which a traced value or a Variable among its arguments does instead.

    They are looked for among the arguments and in lists and tuples of them.
    """

    @wraps(function)
    def dispatched(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for given in (*args, *kwargs.values()):
            for each in given if isinstance(given, list | tuple) else (given,):
                if isinstance(each, Traceable):
                    made: _R = each.__array_function__(dispatched, (), args, kwargs)
                    return made
        return function(*args, **kwargs)

    return dispatched
