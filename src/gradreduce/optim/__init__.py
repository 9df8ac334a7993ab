"""Optimizers: update rules that apply gradients to variables."""

from .agn import (
    AGNCenter,
    AGNCustomGetter,
    AGNOptimizer,
    CenterFaults,
    center_rules,
    simulate_center,
)
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
    "CenterFaults",
    "GradientDescentOptimizer",
    "LionOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
    "center_rules",
    "clip_by_global_norm",
    "simulate_center",
]
