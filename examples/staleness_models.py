"""The two models of the staleness study: handwritten digits in NumPy, characters in PyTorch.

A training repeats itself with other initial values and batches. All repetitions are one training of
arrays with a leading axis: no operation mixes them, and ten of them need little more time than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import digits
import numpy as np

Values = dict[str, np.ndarray]
BATCH_SIZE = 16  # images


class Model(Protocol):
    """A model with its data.

    Attributes:
        guess: the loss if all answers get the same probability.
    """

    guess: float

    def initial(self, seeds: Sequence[int]) -> Values:
        """Returns initial values, float32[len(seeds), ...], by name."""

    def gradient(self, values: Values, random: np.random.Generator) -> Values:
        """Returns the mean gradients of a random batch for each repetition."""

    def losses(self, values: Values) -> list[float]:
        """Returns the mean held-out loss of each repetition; infinite if it is not a number."""


class Digits:
    """The network and the data of ``digits.py``, with gradients by hand.

    Args:
        for_grid: a part of the training set is held out instead of the test set.
    """

    guess = math.log(10)

    def __init__(self, for_grid: bool) -> None:
        data = digits.load()
        self._images, self._labels = data.train_images, data.train_labels
        self._held_out = data.test_images, data.test_labels
        if for_grid:
            split = len(self._images) * 4 // 5
            self._held_out = self._images[split:], self._labels[split:]
            self._images, self._labels = self._images[:split], self._labels[:split]

    def initial(self, seeds: Sequence[int]) -> Values:
        return stacked([digits.initial_weights(np.random.default_rng(seed)) for seed in seeds])

    def gradient(self, values: Values, random: np.random.Generator) -> Values:
        hidden_kernel, hidden_bias, output_kernel, output_bias = values.values()
        pick = random.integers(len(self._images), size=(len(hidden_bias), BATCH_SIZE))
        images, labels = self._images[pick], self._labels[pick]
        hidden = np.tanh(images @ hidden_kernel + hidden_bias[:, None])
        scores = hidden @ output_kernel + output_bias[:, None]
        exps = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probabilities = exps / exps.sum(axis=-1, keepdims=True)
        of_scores = (probabilities - ONE_HOT[labels]) / np.float32(BATCH_SIZE)
        of_hidden = of_scores @ output_kernel.swapaxes(1, 2) * (1 - hidden * hidden)
        return {
            "hidden/kernel": images.swapaxes(1, 2) @ of_hidden,
            "hidden/bias": of_hidden.sum(axis=1),
            "output/kernel": hidden.swapaxes(1, 2) @ of_scores,
            "output/bias": of_scores.sum(axis=1),
        }

    def losses(self, values: Values) -> list[float]:
        return each_loss(values, lambda *weights: digits.mean_loss(weights, *self._held_out))


ONE_HOT = np.eye(10, dtype=np.float32)


def stacked(repetitions: Sequence[Values]) -> Values:
    """Returns the values of all repetitions, with a leading axis."""
    return {name: np.stack([each[name] for each in repetitions]) for name in repetitions[0]}


def each_loss(values: Values, loss: Callable[..., float]) -> list[float]:
    """Computes the loss of each repetition; infinite if it is not a number."""
    found = [float(loss(*weights)) for weights in zip(*values.values(), strict=True)]
    return [each if math.isfinite(each) else math.inf for each in found]


@cache
def load(name: str, for_grid: bool = False) -> Model:
    """Returns the model "digits" or "characters"; the second imports PyTorch."""
    if name == "digits":
        return Digits(for_grid)
    from staleness_characters import Characters

    return Characters(for_grid)
