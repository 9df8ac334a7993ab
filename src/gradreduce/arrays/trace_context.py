"""The loss that a thread is computing, and the arguments of functions that NumPy dispatches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Protocol

from gradreduce.device import Buffer, Device

_CREATING = {
    "arange", "array", "asanyarray", "asarray", "ascontiguousarray", "empty", "eye", "full",
    "identity", "ones", "tri", "zeros",
}  # fmt: skip

# Parameters of functions whose signatures NumPy before 2.4 does not have.
_POSITIONAL = {"concatenate": ("arrays", "axis", "out"), "dot": ("a", "b", "out")}


class Reader(Protocol):
    """Interface through which a loss reads Variables.

    Attributes:
        home: the device of the first copy that was read; host arrays of the loss are put there.
    """

    home: Device | None

    def read(self, variable: Any, copy: Buffer, output_type: str | None) -> Any:
        """Returns the value of one copy of a Variable, traced by the loss."""

    def check_unread(self, variables: Iterable[Any]) -> None:
        """See the function ``check_unread``."""


# For each thread, or asyncio task in a thread: several losses may be computed at once.
_reader: ContextVar[Reader | None] = ContextVar("gradreduce_reader", default=None)


def current_reader() -> Reader | None:
    """Returns the ``Reader`` of this thread's loss; None outside a loss."""
    return _reader.get()


def check_unread(variables: Iterable[Any]) -> None:
    """Raises if the current loss has read one of these Variables.

    Raises:
        RuntimeError: a Variable must not be written, because the tape uses its memory.
    """
    reader = _reader.get()
    if reader is not None:
        reader.check_unread(variables)


@contextmanager
def reading_by(reader: Reader) -> Iterator[None]:
    """Context manager: ``reader`` reads this thread's Variables; contexts do not nest."""
    _reader.set(reader)
    try:
        yield
    finally:
        _reader.set(None)


def bind_arguments(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a NumPy call by the names of their parameters."""
    return {**dict(zip(_positional(function), args, strict=False)), **kwargs}


def to_positional(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Moves arguments passed by name to their positions, up to the first missing one."""
    placed, rest = list(args), dict(kwargs)
    for name in _positional(function)[len(placed) :]:
        if name not in rest:
            break
        placed.append(rest.pop(name))
    return placed, rest


@lru_cache(maxsize=1024)
def _positional(function: Callable[..., Any]) -> Sequence[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _POSITIONAL.get(function.__name__, ())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def make_like(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], array: Any) -> Any:
    """Runs NumPy's creating ``function`` with ``like=array``, a plain array.

    For a call that NumPy dispatches because of ``like=``, which NumPy has removed. None of the
    other arguments is ``Traceable``.

    Raises:
        NotImplementedError: the function has no ``like=``: then a Traceable is inside nested lists.
    """
    name = function.__name__
    if name not in _CREATING:
        raise NotImplementedError(
            f"np.{name} of nested lists cannot be differentiated; use np.stack and np.concatenate, "
            "or return a PyTorch tensor from the loss: then PyTorch differentiates it"
        )
    if hasattr(array, "__array_function__"):
        kwargs = {**kwargs, "like": array}
    return function(*args, **kwargs)  # with a NumPy number the result is a NumPy array in any case
