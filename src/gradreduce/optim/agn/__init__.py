"""Accumulated gradient normalization (AGN): workers push mean gradients to a center.

Source: tf.contrib.opt.AGNOptimizer (agn_optimizer.md); arXiv 1710.02368.
"""

from . import center_rules
from .center import AGNCenter
from .optimizer import AGNOptimizer
from .simulate import CenterFaults, simulate_center
from .variables import AGNCustomGetter

__all__ = [
    "AGNCenter",
    "AGNCustomGetter",
    "AGNOptimizer",
    "CenterFaults",
    "center_rules",
    "simulate_center",
]
