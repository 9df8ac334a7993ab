"""Accumulators and AGN centers that processes and machines share, as actors of Ray.

Imported only when asked for, as ``gr.ray``: ``import gradreduce`` does not import Ray.
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
from .lead import WorkerInfo

__all__ = [
    "AGNCenter",
    "AccumulatorSet",
    "AccumulatorSpec",
    "ConditionalAccumulator",
    "SparseConditionalAccumulator",
    "WorkerInfo",
    "init",
]
