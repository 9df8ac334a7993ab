"""All derivative rules: importing this module fills the registry."""

from __future__ import annotations

from . import (
    rules_broadcast,
    rules_elementwise,
    rules_indexing,
    rules_linear,
    rules_losses,
    rules_reductions,
    rules_shapes,
)

__all__ = [
    "rules_broadcast",
    "rules_elementwise",
    "rules_indexing",
    "rules_linear",
    "rules_losses",
    "rules_reductions",
    "rules_shapes",
]
