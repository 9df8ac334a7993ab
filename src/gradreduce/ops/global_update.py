"""AGN's global update with each rule: kernels of ``global_update.cu``."""

from __future__ import annotations

from .update_kernels import rule_kernels

GLOBAL_UPDATES = {kernel.rule: kernel for kernel in rule_kernels("global", "global_update")}
