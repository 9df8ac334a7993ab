"""SGD and momentum updates: kernels of ``update.cu``."""

from __future__ import annotations

from .update_kernels import rule_kernels

SGD, MOMENTUM, NESTEROV = rule_kernels("plain", "update", ("sgd", "momentum", "nesterov"))
