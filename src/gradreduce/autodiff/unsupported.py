"""What a loss must not do, because its gradient would be lost or wrong, and how it is told.

Never differentiates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .frameworks import is_tensor

__all__ = [
    "WriteError",
    "beside_tensor",
    "check_keywords",
    "check_operand",
    "is_float",
    "name_of",
    "no_rule",
    "out_of",
    "view_written",
    "would_write",
]

#: Of functions whose ``out`` may be given by its place: which place.
_OUT_PLACES = {
    np.sum: 3, np.mean: 3, np.prod: 3, np.var: 3, np.std: 3, np.cumsum: 3,
    np.max: 2, np.amax: 2, np.min: 2, np.amin: 2, np.clip: 3, np.take: 3,
    np.concatenate: 2, np.stack: 2, np.dot: 2, np.outer: 2, np.trace: 5,
    np.argmax: 2, np.argmin: 2, np.all: 2, np.any: 2, np.round: 2, np.around: 2, np.fix: 1,
}  # fmt: skip
#: Of ufuncs: what changes no more than the dtype and the layout of the result.
_HARMLESS = frozenset({"dtype", "casting", "order", "subok"})
_PLAIN = frozenset(
    {np.ndarray, np.float16, np.float32, np.float64, np.int64, float, int, bool, slice, type(None)}
)


class WriteError(NotImplementedError, TypeError):
    """A loss writes into an array what it computed."""


def no_rule(name: str) -> NotImplementedError:
    """What an operation without a rule raises."""
    return NotImplementedError(
        f"{name} has no rule of differentiation here; write it in other operations, wrap what "
        "needs no gradient in gr.autodiff.stop_gradient(...), or return a PyTorch tensor from the "
        "loss (gr.Variables are tensors in torch functions): then PyTorch differentiates"
    )


def name_of(function: Any) -> str:
    """As users write it."""
    module = getattr(function, "__module__", None) or ""
    prefix = "gr" if module.startswith("gradreduce") else "np" + module.removeprefix("numpy")
    return f"{prefix}.{getattr(function, '__name__', function)}"


def out_of(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Into what a function is to write its result, by name or by place; None: a new array."""
    out = kwargs.get("out")
    index = _OUT_PLACES.get(function)
    return args[index] if out is None and index is not None and len(args) > index else out


def would_write(name: str) -> WriteError:
    """What ``out=`` raises, and ``a += b`` of an array ``a`` that is not traced."""
    return WriteError(
        f"{name} would write a traced value, or into one: a loss has no out= and no a += b of an "
        "array; write a = a + b"
    )


def view_written() -> WriteError:
    """What ``a += b`` raises of a part of another traced value, which NumPy would change too."""
    return WriteError(
        "a += b, where a is a part or another shape of a traced value, would leave that value as "
        "it is, and NumPy would not: write a = a + b, and build the whole by np.where, "
        "np.concatenate or np.stack"
    )


def check_keywords(ufunc: Any, kwargs: dict[str, Any]) -> None:
    """Raises for what changes the meaning of a ufunc, which its rule does not know."""
    for key, value in kwargs.items():
        if key not in _HARMLESS and not (key == "where" and value is True):
            raise no_rule(f"{name_of(ufunc)}(..., {key}=)")


def check_operand(given: Any) -> None:
    """Raises for an array, or a list of some, whose own arithmetic is not that of NumPy's arrays.

    Raises:
        TypeError: a tensor of PyTorch's, a masked array, an np.matrix.
    """
    if type(given) in _PLAIN:
        return
    if isinstance(given, list | tuple):
        for each in given:
            check_operand(each)
    elif isinstance(given, np.ndarray):
        if isinstance(given, np.matrix):
            raise TypeError("an np.matrix is multiplied otherwise: pass np.asarray(matrix)")
        if hasattr(given, "mask"):
            raise TypeError("a masked array would lose its mask: pass .filled(0)")
    elif is_tensor(given):
        raise beside_tensor()


def is_float(function: Any, value: Any) -> bool:
    """Whether a result can change with its operands; integers are constants."""
    if not hasattr(value, "dtype") or is_tensor(value):
        raise no_rule(f"{name_of(function)} with {type(value).__name__} as its result")
    if value.dtype.kind == "c":
        raise no_rule(f"{name_of(function)} with complex numbers")
    if value.dtype.kind in "OmM":
        raise no_rule(f"{name_of(function)} with {value.dtype} as the dtype of its result")
    return value.dtype.kind in "fV"  # bfloat16 is of kind V in ml_dtypes


def beside_tensor() -> TypeError:
    """What a traced value and a tensor in one operation raise."""
    return TypeError(
        "a value that NumPy's tape traces has come together with a PyTorch tensor: in such a loss "
        'write variable.read("torch") * 2 instead of variable * 2'
    )
