"""The shapes of ResNet-50's gradients, from its architecture (arXiv 1512.03385, table 1)."""

from __future__ import annotations

import math

QUICK_SIZE, QUICK_TENSORS = 2**7, 12
# Planes of a stage's bottlenecks, and how many bottlenecks it has.
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


def resnet50(quick: bool = False) -> list[tuple[int, ...]]:
    """Returns 161 shapes with 25,557,032 elements, in the order of the layers; or a few small."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, num_blocks in STAGES:
        for block in range(num_blocks):
            convolutions = [
                (planes, width, 1, 1),
                (planes, planes, 3, 3),
                (4 * planes, planes, 1, 1),
            ]
            if block == 0:
                convolutions.append((4 * planes, width, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            width = 4 * planes
    shapes += [(1000, 2048), (1000,)]
    if quick:
        return [(min(math.prod(shape), QUICK_SIZE),) for shape in shapes[:QUICK_TENSORS]]
    return shapes
