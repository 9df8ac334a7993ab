"""How many gradients arrived and how fresh they are: conditional accumulators."""

from __future__ import annotations

from .base import ConditionalAccumulatorBase
from .dense import ConditionalAccumulator
from .multi import apply_grads, take_grads, take_now
from .sparse import SparseConditionalAccumulator

__all__ = [
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "SparseConditionalAccumulator",
    "apply_grads",
    "take_grads",
    "take_now",
]
