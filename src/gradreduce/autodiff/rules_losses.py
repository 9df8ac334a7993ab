"""Functions for losses that NumPy does not have, with their derivative rules.

All take NumPy and CuPy arrays, Variables and traced values, and keep the dtype; those that sum
compute 16-bit floats in float32 and round once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradreduce.arrays.trace_context import traceable
from gradreduce.errors import InvalidArgumentError

from .array_methods import astype
from .registry import RULES, VJP, Maker
from .rules_broadcast import is_half, kept_shape, shape_of, widened
from .rules_elementwise import chosen, one


@traceable
def relu(x: Any) -> Any:
    """``max(x, 0)``; its derivative at 0 is 0."""
    return np.maximum(x, 0)


@traceable
def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``, without overflow."""
    return np.tanh(x * 0.5) * 0.5 + 0.5


@traceable
def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """``log(sum(exp(x)))`` over ``axis``, without overflow.

    Args:
        x: an array.
        axis: None for all, an integer or a tuple of them.
        keepdims: as in ``np.sum``.
    """
    if is_half(x):
        return astype(logsumexp(widened(x), axis, keepdims), x.dtype)
    top = np.max(x, axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, np.zeros_like(top))  # inf - inf would be nan
    with np.errstate(divide="ignore"):  # if all are -inf
        found = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top
    return found if keepdims else np.squeeze(found, axis)


@traceable
def softmax_cross_entropy(logits: Any, labels: Any) -> Any:
    """Cross entropy of ``softmax(logits)`` and ``labels``, for each example.

    Args:
        logits: ``(…, classes)``.
        labels: an array or a list: ``(…,)`` integers, the class of each example, or
            ``(…, classes)`` floats, the probability of each class.

    Returns:
        The losses, ``(…,)``, in the dtype of ``logits``.

    Raises:
        ValueError: the shapes do not match.
        InvalidArgumentError: (a ``ValueError``) a class is negative or not below the number of
            classes. Labels on a GPU are not checked, and their loss is 0.
    """
    labels = _array(labels, logits)
    _check_classes(labels, logits.shape[-1])
    if is_half(logits):
        return astype(softmax_cross_entropy(widened(logits), labels), logits.dtype)
    log_sum = logsumexp(logits, axis=-1)
    wanted = _as_probabilities(logits, labels)
    total = np.sum(wanted, axis=-1)
    return log_sum * total - np.sum(chosen(wanted != 0, logits) * wanted, axis=-1)


def _array(labels: Any, logits: Any) -> Any:
    """Converts a list of labels to an array of the library of ``logits``."""
    return labels if hasattr(labels, "dtype") else np.asarray(np.asarray(labels), like=logits)


def _check_classes(labels: Any, num_classes: int) -> None:
    if isinstance(labels, np.ndarray | np.generic) and labels.dtype.kind in "iu" and labels.size:
        low, high = labels.min(), labels.max()
        if low < 0 or high >= num_classes:
            raise InvalidArgumentError(
                f"labels are from {low} to {high}; allowed are 0 to {num_classes - 1}"
            )


def _as_probabilities(logits: Any, labels: Any) -> Any:
    """Converts ``labels`` to an array of the shape and dtype of ``logits``."""
    shape, labels = shape_of(logits), _array(labels, logits)
    if labels.dtype.kind not in "iub":
        if shape_of(labels) != shape:
            raise ValueError(f"labels have shape {shape_of(labels)}; expected {shape}, as logits")
        return labels if labels.dtype == logits.dtype else labels.astype(logits.dtype)
    if shape_of(labels) != shape[:-1]:
        raise ValueError(
            f"integer labels have shape {shape_of(labels)}; logits of shape {shape} need "
            f"{shape[:-1]}, a class for each example"
        )
    classes = np.arange(shape[-1], like=labels)
    return (labels[..., None] == classes).astype(logits.dtype)


def _rounded(term: Any, of: Any) -> Any:
    """Converts a term that was computed in float32 back to the dtype of ``of``."""
    return astype(term, of.dtype) if is_half(of) else term


def _logsumexp(out: Any, x: Any, axis: Any = None, keepdims: bool = False) -> tuple[Maker]:
    kept = kept_shape(shape_of(x), axis)

    def vjp(g: Any) -> Any:
        if not is_half(x):
            return np.reshape(g, kept) * np.exp(x - np.reshape(out, kept))
        x32 = widened(x)  # out is rounded: recompute it in float32
        share = np.exp(x32 - logsumexp(x32, axis, keepdims=True))
        return _rounded(np.reshape(g, kept) * share, x)

    return (lambda: vjp,)


def _softmax_cross_entropy(out: Any, logits: Any, labels: Any) -> tuple[Maker, Maker]:
    def to_logits() -> VJP:
        def vjp(g: Any) -> Any:
            x32 = widened(logits)
            share = np.exp(x32 - logsumexp(x32, axis=-1, keepdims=True))
            wanted = _as_probabilities(x32, labels)
            total = np.sum(wanted, axis=-1, keepdims=True)
            return _rounded(g[..., None] * (share * total - wanted), logits)

        return vjp

    def to_labels() -> VJP:
        def vjp(g: Any) -> Any:
            x32 = widened(logits)
            return _rounded(g[..., None] * (logsumexp(x32, axis=-1, keepdims=True) - x32), logits)

        return vjp

    return to_logits, to_labels


def _relu(out: Any, x: Any) -> VJP:
    above = out > 0
    return lambda g: chosen(above, g)


one(relu, _relu)
one(sigmoid, lambda out, x: lambda g: g * (out * (1 - out)))
RULES[logsumexp] = _logsumexp
RULES[softmax_cross_entropy] = _softmax_cross_entropy
