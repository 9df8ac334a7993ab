"""Errors for operations in a loss whose gradient would be lost or wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gradreduce.arrays.convert import is_masked

from .frameworks import is_tensor

#: Keywords of ufuncs that change only the dtype and the layout of the result.
HARMLESS = frozenset({"dtype", "casting", "order", "subok"})


class WriteError(NotImplementedError, TypeError):
    """Raised if a loss writes a traced value into an array."""


class NoMethodError(NotImplementedError, AttributeError):
    """Raised for a method without a derivative rule; an AttributeError, so ``hasattr`` works."""


def no_rule(name: str) -> NotImplementedError:
    """Returns the error for an operation without a derivative rule."""
    return NotImplementedError(
        f"{name} has no derivative rule; express it by other operations, wrap values that need no "
        "gradient in gr.autodiff.stop_gradient(...), or return a PyTorch tensor from the loss, "
        "which PyTorch differentiates (torch functions accept a gr.Variable as a tensor)"
    )


def name_of(function: Any) -> str:
    """Returns the name of a function as users write it."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, np.ufunc):  # a method of a ufunc, such as np.add.reduce
        return f"np.{owner.__name__}.{function.__name__}"
    module = getattr(function, "__module__", None) or ""
    prefix = "gr" if module.startswith("gradreduce") else "np" + module.removeprefix("numpy")
    return f"{prefix}.{getattr(function, '__name__', function)}"


def would_write(name: str) -> WriteError:
    """Returns the error for ``out=``, and for ``a += b`` if ``a`` is not traced."""
    return WriteError(
        f"{name} would write a traced value into an array: a loss does not support out=, nor "
        "a += b if a does not depend on a Variable; write a = a + b"
    )


def check_operands(values: Iterable[Any]) -> None:
    """Raises for arrays whose arithmetic differs from that of NumPy arrays.

    Raises:
        TypeError: a value, or an item of it, is a PyTorch tensor, a masked array or an np.matrix.
    """
    for value in values:
        if isinstance(value, list | tuple):
            check_operands(value)
        elif type(value) is np.ndarray:
            continue
        elif isinstance(value, np.matrix) or is_masked(type(value)):
            raise TypeError(
                f"np.{type(value).__name__} is not supported: pass a plain array, "
                "np.asarray(matrix) or masked.filled(0)"
            )
        elif is_tensor(value):
            raise beside_tensor()


def is_float(function: Any, value: Any) -> bool:
    """Whether a result is a float, so differentiable; raises if its dtype is not supported."""
    if not hasattr(value, "dtype"):
        raise no_rule(f"{name_of(function)} with {type(value).__name__} as its result")
    if value.dtype.kind in "cOmM":
        raise no_rule(f"{name_of(function)} with {value.dtype} as the dtype of its result")
    return value.dtype.kind in "fV"  # bfloat16 is of kind V in ml_dtypes


def beside_tensor() -> TypeError:
    """Returns the error for an operation on a traced value and a PyTorch tensor."""
    return TypeError(
        "an operation mixes a traced NumPy value and a PyTorch tensor: in a PyTorch loss "
        'write variable.read("torch") * 2 instead of variable * 2'
    )
