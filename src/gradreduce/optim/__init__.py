"""Optimizers: update rules that apply gradients to variables."""

from .agn import AGNCenter, AGNCustomGetter, AGNOptimizer, center_rules
from .clip import clip_by_global_norm
from .optimizer import Optimizer
from .rules import (
    AdagradOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    GradientDescentOptimizer,
    LionOptimizer,
    MomentumOptimizer,
    RMSPropOptimizer,
)

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
    "center_rules",
    "clip_by_global_norm",
]
