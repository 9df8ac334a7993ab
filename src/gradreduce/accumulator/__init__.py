"""Conditional accumulators: sum gradients over time and drop stale ones."""

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
