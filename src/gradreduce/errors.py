"""Which errors the library raises that Python does not already have; never decides when."""

from __future__ import annotations

import reprlib
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
    "NotCopied",
    "about",
    "brief",
    "listed",
    "repeated",
]


class InvalidArgumentError(ValueError):
    """An argument has the right type and an impossible value (TensorFlow's class of that name)."""


class CancelledError(RuntimeError):
    """The object was closed while the call waited for it, or before the call was made."""


class CaptureError(RuntimeError):
    """What was asked cannot be captured, or not inside a capture; nothing was changed."""


class DeadlineExceededError(TimeoutError):
    """The ``timeout`` of a blocking call ran out; the text says what was still missing."""


class DeviceMismatchError(ValueError):
    """An array lies on a device that this call cannot reach, or that belongs to another mesh."""


class BackendUnavailableError(RuntimeError):
    """The backend asked for cannot run here; the text says why and what to install."""


class CollectiveError(RuntimeError):
    """A collective across devices failed, or the mesh is dead: a deadline passed.

    The text says which device was late, with which pack and which tensors. A dead mesh refuses
    every use until ``mesh.reset()``.
    """


class InvalidVariableError(TypeError, ValueError):
    """A ``var_list`` or loss is not what it must be.

    Both types, because the seed names ``TypeError`` for ``compute_gradients`` and ``ValueError``
    for ``minimize`` for the same fault.
    """


class MixedDtypesError(TypeError, ValueError):
    """The terms of a gradient, to be added by ACCUMULATE_N, are of several dtypes.

    Both types, because TensorFlow 1.x raises ``ValueError`` there, as its ``accumulate_n`` does,
    and later versions ``TypeError``, as ``add_n`` does for every other method.
    """


class NotCopied:
    """Base of what holds devices: pickling, ``copy.copy`` and ``copy.deepcopy`` raise a sentence.

    Attributes:
        _copied_as: what to do instead.
    """

    __slots__ = ()

    _copied_as = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} objects cannot be pickled or copied; {self._copied_as}")


def about(what: str, error: TypeError | ValueError) -> TypeError | ValueError:
    """The same error, told of ``what``; one of a foreign class, whose text is not ours, as it is.

    Write ``raise about("replica 1", error) from None``.
    """
    ours = type(error) in (TypeError, ValueError, DeviceMismatchError, InvalidArgumentError)
    return type(error)(f"{what}: {error}") if ours else error


def listed(items: Iterable[Any], most: int = 5) -> str:
    """Items for an error, ``"a, b, c, d, e and 7 more"``: at most ``most`` of them."""
    given = [str(item) for item in items]
    rest = len(given) - most
    return ", ".join(given[:most]) + (f" and {rest} more" if rest > 0 else "")


_LIBRARIES = ("numpy", "cupy", "torch", "jax", "jaxlib")


class _Brief(reprlib.Repr):
    """At most five items of a list or dict, and of an array its dtype and shape."""

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
    """The ``repr`` of what came, for an error: in one line, however large it is."""
    return " ".join(_brief.repr(value).split())


def repeated(items: Iterable[Any]) -> list[Any]:
    """Those that come more than once, for an error."""
    return [item for item, count in Counter(items).items() if count > 1]
