"""Data set, small network and loss that the examples share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gradreduce as gr

NUM_HIDDEN = 64
MICRO_BATCH_SIZE = 16  # images
GOAL = 0.95  # test accuracy


@dataclass(frozen=True)
class Digits:
    """Flat images of 8 by 8 pixels from 0 to 1, with digits as labels."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load() -> Digits:
    """Loads scikit-learn's digits; a fixed fifth of them is the test set."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def initial_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns weights of two dense layers: 64 pixels, ``NUM_HIDDEN`` units, 10 digits."""

    def dense(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / math.sqrt(rows)).astype(np.float32)

    return {
        "hidden/kernel": dense(64, NUM_HIDDEN),
        "hidden/bias": np.zeros(NUM_HIDDEN, np.float32),
        "output/kernel": dense(NUM_HIDDEN, 10),
        "output/bias": np.zeros(10, np.float32),
    }


def read_weights(variables: Sequence[gr.Variable], replica: int) -> list[np.ndarray]:
    """Returns one replica's copy of the variables as NumPy arrays."""
    with gr.replica(replica):
        return [variable.numpy() for variable in variables]


def logits(weights: Sequence[Any], images: Any) -> Any:
    """Computes a score for each of the ten digits."""
    hidden_kernel, hidden_bias, output_kernel, output_bias = weights
    return np.tanh(images @ hidden_kernel + hidden_bias) @ output_kernel + output_bias


def mean_loss(weights: Sequence[Any], images: np.ndarray, labels: np.ndarray) -> Any:
    """Computes the mean cross-entropy of a batch.

    Args:
        weights: Variables, to differentiate by them, or arrays.
        images: in host memory; copied to the device of the weights.
        labels: likewise.
    """
    images, labels = (np.asarray(each, like=weights[0]) for each in (images, labels))
    return np.mean(gr.autodiff.softmax_cross_entropy(logits(weights, images), labels))


def loss_and_gradients(
    optimizer: gr.Optimizer,
    variables: Sequence[gr.Variable],
    images: np.ndarray,
    labels: np.ndarray,
    *,
    scale: float = 1.0,
) -> tuple[Any, list[Any]]:
    """Computes the mean loss of a batch, and its gradients times ``scale``.

    Both are on the device of the enclosing ``gr.replica``.
    """
    found = []

    def loss() -> Any:
        value = mean_loss(variables, images, labels)
        found.append(gr.autodiff.stop_gradient(value))
        return value

    pairs = optimizer.compute_gradients(loss, variables, grad_loss=scale)
    return found[0], [gradient for gradient, _ in pairs]


def accuracy(weights: Sequence[np.ndarray], digits: Digits) -> float:
    """Returns the fraction of test images that are classified correctly."""
    found = logits(weights, digits.test_images).argmax(axis=1)
    return float((found == digits.test_labels).mean())
