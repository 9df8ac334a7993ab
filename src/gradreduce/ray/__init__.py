"""Accumulators and AGN centers that processes and machines share, in actors of Ray.

It is imported at the first use of ``gr.ray``, so ``import gradreduce`` does not import Ray.
"""

from __future__ import annotations

from .accumulator_state import AccumulatorSpec
from .accumulators import (
    AccumulatorSet,
    ConditionalAccumulator,
    SparseConditionalAccumulator,
)
from .center import AGNCenter
from .cluster import init
from .coordinator import WorkerInfo

__all__ = [
    "AGNCenter",
    "AccumulatorSet",
    "AccumulatorSpec",
    "ConditionalAccumulator",
    "SparseConditionalAccumulator",
    "WorkerInfo",
    "init",
]
