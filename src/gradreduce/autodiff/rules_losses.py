"""Functions for losses that NumPy does not have.

All take NumPy and CuPy arrays, Variables and traced values, and keep the dtype; those that sum
compute 16-bit floats in float32 and round once.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import numpy as np

from gradreduce.arrays.array_methods import traceable
from gradreduce.errors import InvalidArgumentError

from .frameworks import stop_gradient
from .registry import COMPOSED, RULES, VJP
from .rules_broadcast import is_half, shape_of, widened


def relu(x: Any) -> Any:
    """``max(x, 0)``; its derivative at 0 is 0."""
    return np.maximum(0, x)  # of equal values the first gets the gradient


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
        return logsumexp(widened(x), axis, keepdims).astype(x.dtype)
    top = np.max(stop_gradient(x), axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, np.zeros_like(top))  # inf - inf would be nan
    with np.errstate(divide="ignore"):  # if all are -inf
        found = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=keepdims))
    return found + (top if keepdims else np.squeeze(top, axis))


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
        return softmax_cross_entropy(widened(logits), labels).astype(logits.dtype)
    wanted = _as_probabilities(logits, labels)
    # 0 * inf would be nan, where a class has no probability.
    scores = np.where(wanted != 0, logits, np.zeros_like(logits))
    log_sum = logsumexp(logits, axis=-1)
    return log_sum * np.sum(wanted, axis=-1) - np.sum(scores * wanted, axis=-1)


def _softmax_cross_entropy(out: Any, logits: Any, labels: Any) -> tuple[VJP, VJP]:
    def to_logits(g: Any) -> Any:
        x32 = widened(logits)
        wanted = _as_probabilities(x32, _array(labels, logits))
        share = np.exp(x32 - logsumexp(x32, axis=-1, keepdims=True))
        return g[..., None] * (share * np.sum(wanted, axis=-1, keepdims=True) - wanted)

    def to_labels(g: Any) -> Any:
        x32 = widened(logits)
        return g[..., None] * (logsumexp(x32, axis=-1, keepdims=True) - x32)

    return to_logits, to_labels


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
    shape = shape_of(logits)
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


COMPOSED[logsumexp] = unwrap(logsumexp)  # on the GPU of the operand
RULES[softmax_cross_entropy] = _softmax_cross_entropy
