"""PyTorch modules whose gradients are reduced: some with a trivial backward, and ResNet-18."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class _Give(torch.autograd.Function):  # type: ignore[misc]  # PyTorch need not be installed
    """The identity; its backward returns given gradients for parameters."""

    @staticmethod
    def forward(context: Any, x: Any, gradients: Sequence[Any], *parameters: Any) -> Any:
        context.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(context: Any, *outer: Any) -> Any:
        return *outer, None, *context.gradients


class Given(nn.Module):  # type: ignore[misc]
    """Parameters of some shapes, whose gradients are given: backward computes nothing.

    The last parameters get their gradients first; a node of backward gives ``at_once``.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], at_once: int = 1) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self._gradients = [torch.ones(shape) for shape in shapes]
        self._at_once = at_once

    def forward(self, x: Any) -> Any:
        """Returns ``x``; for autograd it depends on all parameters."""
        parameters = list(self.weights)
        for start in range(0, len(parameters), self._at_once):
            here = slice(start, start + self._at_once)
            x = _Give.apply(x, self._gradients[here], *parameters[here])
        return x


def _convolution(planes_in: int, planes: int, size: int, stride: int) -> Any:
    convolution = nn.Conv2d(planes_in, planes, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(planes))


class _Block(nn.Module):  # type: ignore[misc]
    """Two 3 x 3 convolutions and a shortcut, added before a ReLU."""

    def __init__(self, planes_in: int, planes: int, stride: int) -> None:
        super().__init__()
        first, last = _convolution(planes_in, planes, 3, stride), _convolution(planes, planes, 3, 1)
        self.main = nn.Sequential(first, nn.ReLU(inplace=True), last)
        same = planes_in == planes
        self.shortcut = nn.Sequential() if same else _convolution(planes_in, planes, 1, stride)

    def forward(self, x: Any) -> Any:
        return (self.main(x) + self.shortcut(x)).relu()


def resnet18() -> Any:
    """Returns ResNet-18 (arXiv 1512.03385, table 1): 11,689,512 parameters."""
    layers = [_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for planes in (64, 128, 256, 512):
        layers += [_Block(width, planes, 1 if planes == 64 else 2), _Block(planes, planes, 1)]
        width = planes
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
