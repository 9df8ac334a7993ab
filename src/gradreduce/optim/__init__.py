"""How a gradient changes a variable: the optimizers."""

from __future__ import annotations

from .adaptive import AdagradOptimizer, AdamOptimizer, RMSPropOptimizer
from .agn import AGNCenter, AGNCustomGetter, AGNOptimizer
from .base import Optimizer
from .clip import clip_by_global_norm
from .rules import GradientDescentOptimizer, MomentumOptimizer

__all__ = [
    "AGNCenter",
    "AGNCustomGetter",
    "AGNOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
    "clip_by_global_norm",
]
