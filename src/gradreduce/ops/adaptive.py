"""Adam, Adagrad and RMSProp: kernels of ``adaptive.cu``."""

from __future__ import annotations

from .update_kernels import rule_kernels

ADAM, ADAGRAD, RMSPROP, RMSPROP_CENTERED = rule_kernels(
    "plain", "adaptive", ("adam", "adagrad", "rmsprop", "rmsprop_centered")
)
