"""Exception classes of the library, and helpers for messages."""

from __future__ import annotations

import logging
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NoReturn, TypeVar

__all__ = [
    "BackendUnavailableError",
    "CancelledError",
    "CaptureError",
    "CollectiveError",
    "DeadlineExceededError",
    "DeviceMismatchError",
    "InexactSumWarning",
    "InvalidArgumentError",
    "InvalidVariableError",
    "MixedDtypesError",
]


class InexactSumWarning(UserWarning):
    """A sum with ``exact=True`` needed more words than it has, or overflowed on the way.

    Its bits may depend on the order of the terms. The warning comes from the first wait of the
    host, take or checkpoint after the devices have added; docs/same_bits.md says more.

    Example:
        >>> import warnings
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> accumulator = gr.ConditionalAccumulator("float32", device=mesh, exact=True, words=2)
        >>> for term in (1.0, 1e-10, 1e-20):
        ...     _ = accumulator.apply_grad(np.float32([term]))
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     _ = accumulator.take_grad(1)
        >>> caught[0].category.__name__
        'InexactSumWarning'
    """


class InvalidArgumentError(ValueError):
    """An argument has the right type but an invalid value (named as in TensorFlow).

    Example:
        >>> gr.IndexedSlices(np.zeros((1, 2)), [-1])
        Traceback (most recent call last):
            ...
        gradreduce.errors.InvalidArgumentError: indices[0] = -1 is negative, or too large for int64
    """


class CancelledError(RuntimeError):
    """The object was closed, or its mesh failed while the call waited.

    Example:
        >>> accumulator = gr.ConditionalAccumulator("float32", (2,))
        >>> accumulator.close()
        >>> accumulator.take_grad(1)
        Traceback (most recent call last):
            ...
        gradreduce.errors.CancelledError: the accumulator 'conditional_accumulator' was closed
    """


class CaptureError(RuntimeError):
    """The operation cannot be captured, or cannot run during a capture.

    On error, state is unchanged.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim", peer_access=False)
        >>> ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        >>> ops.capture(gr.ReduceOp.SUM, ops.pairs([{"w": np.ones(2)}, {"w": np.ones(2)}]))
        Traceback (most recent call last):
            ...
        gradreduce.errors.CaptureError: physical devices 0 and 1 have no peer access: ...
    """


class DeadlineExceededError(TimeoutError):
    """A wait for gradients, workers or an actor took longer than its ``timeout``.

    The message says what was missing, or which actor did not answer. A take has taken nothing. A
    call to an actor may still be applied. A ``deadline`` that passes, and the ``timeout`` of
    ``Mesh.reset``, raise ``CollectiveError`` instead.

    Example:
        >>> accumulator = gr.ConditionalAccumulator("float32", (2,))
        >>> accumulator.take_grad(1, timeout=0.001)
        Traceback (most recent call last):
            ...
        gradreduce.errors.DeadlineExceededError: not enough gradients within 0.001 s; ...
    """


class DeviceMismatchError(ValueError):
    """An array is on a device that this call cannot access, or on another mesh.

    Example:
        >>> mesh, other = gr.open_mesh(1, backend="sim"), gr.open_mesh(1, backend="sim")
        >>> mesh[0].download(other[0].upload(np.ones(2)))
        Traceback (most recent call last):
            ...
        gradreduce.errors.DeviceMismatchError: Buffer(...) is of another mesh ...
    """


class BackendUnavailableError(RuntimeError):
    """A backend, mesh or device cannot be used; the message says why.

    A library or GPU is missing, the mesh was closed or is from before a fork, or a device failed.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> mesh.close()
        >>> mesh[0].zeros((2,), "float32")
        Traceback (most recent call last):
            ...
        gradreduce.errors.BackendUnavailableError: the mesh of this sim device was closed; ...
    """


class CollectiveError(RuntimeError):
    """A collective across devices failed, or the mesh failed because a deadline passed.

    After a deadline, the message names the late device, and the pack and tensors that it worked on.
    Every later use of a failed mesh raises this error until ``mesh.reset()``. Arguments that differ
    between devices or processes raise it too.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> mesh.collective.all_reduce([mesh[0].zeros((2,), "int8"), mesh[1].zeros((3,), "int8")])
        Traceback (most recent call last):
            ...
        gradreduce.errors.CollectiveError: all_reduce: buffer 1 is ..., but buffer 0 is ...
    """


class InvalidVariableError(TypeError, ValueError):
    """A variable or loss has an invalid type, or a dtype that has no gradient.

    Raised for ``var_list``, for the variables of ``grads_and_vars``, and for the result of a loss.

    It has two base classes, because for this fault TensorFlow documents ``TypeError`` in
    ``compute_gradients`` and ``ValueError`` in ``minimize``.

    Example:
        >>> gr.GradientDescentOptimizer(0.1).compute_gradients(lambda: 0.0, var_list=[3])
        Traceback (most recent call last):
            ...
        gradreduce.errors.InvalidVariableError: ...
    """


class MixedDtypesError(TypeError, ValueError):
    """The terms of a gradient, added by ACCUMULATE_N, have different dtypes.

    It has two base classes, because TensorFlow 1.x raises ``ValueError`` for this fault, and later
    versions raise ``TypeError``.

    Example:
        >>> terms = [np.ones(2, "float32"), np.ones(2, "float64")]
        >>> gr.aggregate(terms, gr.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N)
        Traceback (most recent call last):
            ...
        gradreduce.errors.MixedDtypesError: inputs have dtypes that don't all match: ...
    """


class NotCopied:
    """Base class of objects that hold devices and cannot be pickled or copied.

    Attributes:
        _copy_hint: the end of the error message, which says what to do instead.
    """

    __slots__ = ()

    _copy_hint = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} objects cannot be pickled or copied; {self._copy_hint}")


InitT = TypeVar("InitT", bound=Callable[..., None])


def refuses(hints: Mapping[str, str]) -> Callable[[InitT], InitT]:
    """Decorates a constructor: keywords of other libraries raise ``TypeError`` with a hint.

    Args:
        hints: what to do instead, by the name of the keyword, which the constructor does not have.
    """

    def decorate(init: InitT) -> InitT:
        name = init.__qualname__.partition(".")[0]

        @wraps(init)
        def checking_init(*args: Any, **kwargs: Any) -> None:
            for wrong in [each for each in kwargs if each in hints]:
                raise TypeError(f"{name} has no argument {wrong!r}: {hints[wrong]}")
            init(*args, **kwargs)

        return checking_init  # type: ignore[return-value]  # has the same arguments

    return decorate


def about(what: str, error: TypeError | ValueError) -> TypeError | ValueError:
    """Prefixes the message of an error with ``what``; errors of other classes are unchanged.

    Write ``raise about("replica 1", error) from None``.
    """
    ours = type(error) in (TypeError, ValueError, DeviceMismatchError, InvalidArgumentError)
    return type(error)(f"{what}: {error}") if ours else error


def install_hint(extra: str) -> str:
    """Returns the commands that install an extra, from a package index and in a clone."""
    return f"pip install 'gradreduce[{extra}]' (in a clone: pip install '.[{extra}]')"


INSTALL_CUDA = f"{install_hint('cuda13')}; for CUDA 12, without PyTorch, write cuda12"


def listed(items: Iterable[Any], most: int = 5) -> str:
    """Lists at most ``most`` items for a message: ``"a, b and 7 more"``."""
    texts = [str(item) for item in items]
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun: ``"1 pack"``, ``"2 packs"``, ``"2 copies"``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


_NAME_LENGTH = 120  # PyTorch's names of parameters are shorter


def short_name(name: str) -> str:
    """Returns a tensor's name; leaves out the middle of a very long one."""
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
            except (AttributeError, TypeError, RuntimeError):  # not an array
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

    Does nothing at Python's exit, when handlers may have been closed.
    """
    if sys.is_finalizing():
        return
    logging.getLogger(logger).warning(message, *args, stacklevel=2)
