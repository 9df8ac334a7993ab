"""Automatic differentiation of NumPy losses, and functions for losses.

To understand the code, read ``tape.py`` first.
"""

# Importing these modules fills the registry of rules.
from . import rules_elementwise, rules_linear, rules_reductions, rules_shapes  # noqa: F401
from .frameworks import stop_gradient
from .rules_indexing import embedding_lookup
from .rules_losses import logsumexp, relu, sigmoid, softmax_cross_entropy

__all__ = [
    "embedding_lookup",
    "logsumexp",
    "relu",
    "sigmoid",
    "softmax_cross_entropy",
    "stop_gradient",
]
