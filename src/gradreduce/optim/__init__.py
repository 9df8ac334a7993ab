"""How a gradient changes a variable: the optimizers."""

from __future__ import annotations

from .agn import AGNCenter, AGNCustomGetter, AGNOptimizer
from .base import Optimizer
from .rules import AdamOptimizer, GradientDescentOptimizer, MomentumOptimizer

__all__ = [
    "AGNCenter",
    "AGNCustomGetter",
    "AGNOptimizer",
    "AdamOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
]
