"""Exception classes of the library, and helpers for messages."""

from __future__ import annotations

import reprlib
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

__all__ = [
    "BackendUnavailableError",
    "CancelledError",
    "CaptureError",
    "CollectiveError",
    "DeadlineExceededError",
    "DeviceMismatchError",
    "InvalidArgumentError",
    "InvalidVariableError",
    "MixedDtypesError",
]


class InvalidArgumentError(ValueError):
    """An argument has the right type but an invalid value (named as in TensorFlow)."""


class CancelledError(RuntimeError):
    """The object was closed before the call, or while the call waited for it."""


class CaptureError(RuntimeError):
    """The operation cannot be captured, or cannot run during a capture.

    On error, state is unchanged.
    """


class DeadlineExceededError(TimeoutError):
    """The ``timeout`` of a blocking call expired; the message says what was still missing."""


class DeviceMismatchError(ValueError):
    """An array is on a device that this call cannot access, or of another mesh."""


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run here; the message says why and what to install."""


class CollectiveError(RuntimeError):
    """A collective across devices failed, or the mesh failed because a deadline passed.

    The message says which device was late, with which pack and which tensors. A failed mesh rejects
    every use until ``mesh.reset()``.
    """


class InvalidVariableError(TypeError, ValueError):
    """A ``var_list`` or loss has an invalid type or value.

    It has both base classes, because TensorFlow documents ``TypeError`` for ``compute_gradients``
    and ``ValueError`` for ``minimize`` for the same fault.
    """


class MixedDtypesError(TypeError, ValueError):
    """The terms of a gradient, added by ACCUMULATE_N, have different dtypes.

    It has both base classes: TensorFlow 1.x raises ``ValueError`` there, as its ``accumulate_n``
    does, later versions ``TypeError``, as ``add_n`` does for every other method.
    """


class NotCopied:
    """Base class of objects that hold devices and cannot be pickled or copied.

    Attributes:
        _copy_hint: what to do instead, as the end of the error message.
    """

    __slots__ = ()

    _copy_hint = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} objects cannot be pickled or copied; {self._copy_hint}")


def about(what: str, error: TypeError | ValueError) -> TypeError | ValueError:
    """Prefixes the message of an error with ``what``; errors of other classes are unchanged.

    Write ``raise about("replica 1", error) from None``.
    """
    ours = type(error) in (TypeError, ValueError, DeviceMismatchError, InvalidArgumentError)
    return type(error)(f"{what}: {error}") if ours else error


def listed(items: Iterable[Any], most: int = 5) -> str:
    """Lists at most ``most`` items for a message: ``"a, b and 7 more"``."""
    texts = [str(item) for item in items]
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")


_NAME_LENGTH = 120  # PyTorch's names of parameters are shorter


def short_name(name: str) -> str:
    """Returns the name of a tensor, without its middle where it is very long."""
    return name if len(name) <= _NAME_LENGTH else f"{name[:58]}...{name[-59:]}"


_LIBRARIES = ("numpy", "cupy", "torch", "jax", "jaxlib")


class _Brief(reprlib.Repr):
    """Shows at most five items of a collection, and arrays by dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 5
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 200

    def repr1(self, x: Any, level: int) -> str:
        if type(x).__module__.partition(".")[0] in _LIBRARIES:
            try:
                if x.shape:
                    return f"{type(x).__name__} {x.dtype}{list(x.shape)}"
            except (AttributeError, TypeError, RuntimeError):  # no array, or one of odd shape
                pass
        return super().repr1(x, level)


_brief = _Brief()


def brief(value: Any) -> str:
    """Returns a short one-line ``repr`` of any value, for a message."""
    return " ".join(_brief.repr(value).split())


def repeated(items: Iterable[Any]) -> list[Any]:
    """Returns the items that occur more than once."""
    return [item for item, count in Counter(items).items() if count > 1]


def log_warning(logger: str, message: str, *args: object) -> None:
    """Logs a warning.

    Here ``logging`` is imported, which takes as long as ten modules of this package. When Python
    ends, and nothing can be imported any more, it does nothing.
    """
    if sys.is_finalizing():
        return
    import logging

    logging.getLogger(logger).warning(message, *args, stacklevel=2)
