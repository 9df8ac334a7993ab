"""Conditional accumulators: sum gradients over time and drop stale ones."""

from .base import ConditionalAccumulatorBase
from .conditional import ConditionalAccumulator, SparseConditionalAccumulator
from .multi import apply_grads, take_grads

__all__ = [
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "SparseConditionalAccumulator",
    "apply_grads",
    "take_grads",
]
