"""A small character model in PyTorch for the staleness study.

It predicts the next character of Python's help texts from the last eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import train_torch
from staleness_models import Values
from torch.nn.functional import cross_entropy

CONTEXT, WIDTH, NUM_HIDDEN = 8, 16, 64
BATCH_SIZE = 64  # windows
NUM_HELD_OUT = 4096  # windows of the held-out loss


class Characters:
    """An embedding and two dense layers.

    Args:
        for_grid: a part of the training set is held out instead of the test set.
    """

    def __init__(self, for_grid: bool) -> None:
        torch.set_num_threads(1)  # the matrices are small
        windows, held_out, self._num_characters = train_torch.load()
        self.guess = math.log(self._num_characters)
        self._text, other = windows.indices, held_out.indices
        if for_grid:
            split = len(self._text) * 9 // 10
            self._text, other = self._text[:split], self._text[split:]
        places = np.linspace(0, len(other) - CONTEXT - 1, NUM_HELD_OUT).astype(int)
        self._held_out = windows_of(other, places)

    def initial(self, seeds: Sequence[int]) -> Values:
        num_repetitions, num_characters = len(seeds), self._num_characters
        shapes = {
            "embedding": (num_characters, WIDTH),
            "hidden/kernel": (CONTEXT * WIDTH, NUM_HIDDEN), "hidden/bias": (1, NUM_HIDDEN),
            "output/kernel": (NUM_HIDDEN, num_characters), "output/bias": (1, num_characters),
        }  # fmt: skip
        values = {
            name: np.zeros((num_repetitions, *shape), np.float32) for name, shape in shapes.items()
        }
        for repetition, seed in enumerate(seeds):
            random = np.random.default_rng(seed)
            for name in ("embedding", "hidden/kernel", "output/kernel"):
                value = values[name][repetition]
                scale = 1 if name == "embedding" else math.sqrt(len(value))
                value[:] = random.standard_normal(value.shape) / scale
        return values

    def gradient(self, values: Values, random: np.random.Generator) -> Values:
        weights = [torch.tensor(value, requires_grad=True) for value in values.values()]
        places = random.integers(len(self._text) - CONTEXT, size=(len(weights[0]), BATCH_SIZE))
        losses = self._losses(weights, *windows_of(self._text, places))
        grads = torch.autograd.grad(losses.sum(), weights)
        return {name: grad.numpy() for name, grad in zip(values, grads, strict=True)}

    def losses(self, values: Values) -> list[float]:
        weights = [torch.tensor(value) for value in values.values()]
        inputs, targets = (each.expand(len(weights[0]), *each.shape) for each in self._held_out)
        found = self._losses(weights, inputs, targets).tolist()
        return [each if math.isfinite(each) else math.inf for each in found]

    def _losses(
        self, weights: Sequence[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Returns the mean loss of each repetition.

        Args:
            weights: those of ``initial``.
            inputs: characters, [repetition, window, place].
            targets: the next ones, [repetition, window].
        """
        embedding, hidden_kernel, hidden_bias, output_kernel, output_bias = weights
        repetitions = torch.arange(len(embedding))[:, None, None]
        embedded = embedding[repetitions, inputs].flatten(2)
        hidden = torch.tanh(torch.baddbmm(hidden_bias, embedded, hidden_kernel))
        scores = torch.baddbmm(output_bias, hidden, output_kernel)
        losses = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)


def windows_of(text: torch.Tensor, places: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the characters at each place and after it, and the next one."""
    windows = text[torch.from_numpy(places)[..., None] + torch.arange(CONTEXT + 1)]
    return windows[..., :-1], windows[..., -1]
