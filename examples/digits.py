"""What the examples train: the digits, and a small network with a backward pass written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gradreduce as gr

NUM_HIDDEN = 64
GOAL = 0.95  # test accuracy


@dataclass(frozen=True)
class Digits:
    """Pictures of 8 by 8 pixels, flat, from 0 to 1, and the digits that they show."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load() -> Digits:
    """The data set that comes with scikit-learn; a fifth, always the same, is for the test."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def initial_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two dense layers: 64 pixels, ``NUM_HIDDEN`` units, 10 digits."""

    def dense(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / math.sqrt(rows)).astype(np.float32)

    return {
        "hidden/kernel": dense(64, NUM_HIDDEN),
        "hidden/bias": np.zeros(NUM_HIDDEN, np.float32),
        "output/kernel": dense(NUM_HIDDEN, 10),
        "output/bias": np.zeros(10, np.float32),
    }


def read_weights(variables: Sequence[gr.Variable], replica: int) -> list[np.ndarray]:
    """One replica's own copy of the variables, as NumPy arrays."""
    with gr.replica(replica):
        return [variable.numpy() for variable in variables]


def forward(weights: Sequence[np.ndarray], images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden activations and the log-probabilities of the ten digits."""
    hidden_kernel, hidden_bias, output_kernel, output_bias = weights
    hidden = np.tanh(images @ hidden_kernel + hidden_bias)
    logits = hidden @ output_kernel + output_bias
    logits -= logits.max(axis=1, keepdims=True)
    return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def backward(
    weights: Sequence[np.ndarray], images: np.ndarray, labels: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    """The mean cross-entropy of a micro-batch, and its gradient by each of the weights."""
    hidden, log_probabilities = forward(weights, images)
    rows = np.arange(len(labels))
    by_logits = np.exp(log_probabilities)
    by_logits[rows, labels] -= 1
    by_logits /= len(labels)
    by_sums = by_logits @ weights[2].T * (1 - hidden * hidden)
    return float(-log_probabilities[rows, labels].mean()), [
        images.T @ by_sums,
        by_sums.sum(axis=0),
        hidden.T @ by_logits,
        by_logits.sum(axis=0),
    ]


def accuracy(weights: Sequence[np.ndarray], digits: Digits) -> float:
    """The share of test images that are recognised."""
    _, log_probabilities = forward(weights, digits.test_images)
    return float((log_probabilities.argmax(axis=1) == digits.test_labels).mean())
