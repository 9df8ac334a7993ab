"""Optimizers: update rules that apply gradients to variables."""

from __future__ import annotations

from .adaptive import (
    AdagradOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    LionOptimizer,
    RMSPropOptimizer,
)
from .agn import AGNCenter, AGNCustomGetter, AGNOptimizer
from .clip import clip_by_global_norm
from .optimizer import Optimizer
from .sgd import GradientDescentOptimizer, MomentumOptimizer

__all__ = [
    "AGNCenter",
    "AGNCustomGetter",
    "AGNOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AdamWOptimizer",
    "GradientDescentOptimizer",
    "LionOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
    "clip_by_global_norm",
]
