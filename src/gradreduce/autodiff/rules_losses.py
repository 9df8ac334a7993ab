"""Functions for losses that NumPy does not have.

All accept NumPy and CuPy arrays, Variables and traced values, and return the dtype of their
argument. Functions that sum compute 16-bit floats in float32 and round once.
"""

from __future__ import annotations

from functools import partial
from inspect import unwrap
from typing import Any

import numpy as np

from gradreduce.arrays.array_methods import traceable
from gradreduce.errors import InvalidArgumentError

from .frameworks import stop_gradient
from .registry import COMPOSED, RULES, is_half, shape_of, widen


def relu(x: Any) -> Any:
    """Returns ``max(x, 0)``, elementwise. Its derivative at 0 is 0.

    Args:
        x: an array, a Variable or a traced value; the result has its shape and dtype.

    Example:
        >>> gr.autodiff.relu(np.float32([-1, 0, 2]))
        array([0., 0., 2.], dtype=float32)
    """
    return np.maximum(0, x)  # where both are equal, the first argument gets the gradient


def sigmoid(x: Any) -> Any:
    """Returns ``1 / (1 + exp(-x))``, elementwise, without overflow.

    Args:
        x: an array of floats, a Variable or a traced value; the result has its shape and dtype.

    Example:
        >>> gr.autodiff.sigmoid(np.float32([-1000, 0, 1000]))
        array([0. , 0.5, 1. ], dtype=float32)
    """
    return np.tanh(x * 0.5) * 0.5 + 0.5


@traceable
def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Returns ``log(sum(exp(x)))`` over ``axis``, without overflow.

    Args:
        x: an array of floats, a Variable or a traced value; the result has its dtype.
        axis: an integer, a tuple of integers, or None for all axes.
        keepdims: see ``np.sum``.

    Example:
        >>> gr.autodiff.logsumexp(np.array([1000.0, 1000.0])).round(3)  # 1000 + log(2)
        np.float64(1000.693)
    """
    if is_half(x):
        return logsumexp(widen(x), axis, keepdims).astype(x.dtype)
    top = np.max(stop_gradient(x), axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, np.zeros_like(top))  # because inf - inf is nan
    with np.errstate(divide="ignore"):  # the sum is 0 if all elements are -inf
        found = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=keepdims))
    return found + (top if keepdims else np.squeeze(top, axis))


@traceable
def softmax_cross_entropy(logits: Any, labels: Any) -> Any:
    """Returns the cross entropy of ``softmax(logits)`` and ``labels``, for each example.

    Args:
        logits: an array, a Variable or a traced value, ``(…, classes)``.
        labels: an array or a list. Integers of shape ``(…,)`` are the class of each example; floats
            of shape ``(…, classes)`` are the probability of each class.

    Returns:
        The loss of each example, ``(…,)``, in the dtype of ``logits``; float64 for integers.

    Raises:
        ValueError: the shapes do not match.
        InvalidArgumentError: (a ``ValueError``) a class is negative or not below the number of
            classes. Labels on a GPU are not checked: an example with an invalid class has loss 0.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> logits = gr.Variable(np.zeros((1, 2), np.float32), "logits", device=mesh.devices[0])
        >>> loss = lambda: gr.autodiff.softmax_cross_entropy(logits, [1])
        >>> [(grad, _)] = gr.GradientDescentOptimizer(0.1).compute_gradients(loss)
        >>> grad
        array([[ 0.5, -0.5]], dtype=float32)
    """
    labels = _array(labels, logits)
    _check_classes(labels, logits.shape[-1])
    if is_half(logits):
        return softmax_cross_entropy(widen(logits), labels).astype(logits.dtype)
    probabilities = _as_probabilities(logits, labels)
    # Replace logits of classes with probability 0, because 0 * inf is nan.
    scores = np.where(probabilities != 0, logits, np.zeros_like(logits))
    log_sum = logsumexp(logits, axis=-1)
    return log_sum * np.sum(probabilities, axis=-1) - np.sum(scores * probabilities, axis=-1)


def _back_to_logits(g: Any, logits: Any, labels: Any) -> Any:
    x32 = widen(logits)
    wanted = _as_probabilities(x32, _array(labels, logits))
    share = np.exp(x32 - logsumexp(x32, axis=-1, keepdims=True))
    return g[..., None] * (share * np.sum(wanted, axis=-1, keepdims=True) - wanted)


def _back_to_labels(g: Any, logits: Any) -> Any:
    x32 = widen(logits)
    return g[..., None] * (logsumexp(x32, axis=-1, keepdims=True) - x32)


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


COMPOSED[logsumexp] = unwrap(logsumexp)  # so it is computed on the GPU of its operand
RULES[softmax_cross_entropy] = lambda out, logits, labels: (
    partial(_back_to_logits, logits=logits, labels=labels),
    partial(_back_to_labels, logits=logits),
)
