"""AGN's local update with each rule: kernels of ``local_update.cu``."""

from __future__ import annotations

from .update_kernels import rule_kernels

LOCAL_UPDATES = {kernel.rule: kernel for kernel in rule_kernels("local", "local_update")}
