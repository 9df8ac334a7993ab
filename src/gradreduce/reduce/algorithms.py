"""Table of the all-reduce algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from .hierarchical_copy import hierarchical_copy
from .nccl_all_reduce import nccl

__all__ = ["ALGORITHMS"]

# Each takes the jobs and, if it supports them, reduction groups from `as_reduction_groups`.
ALGORITHMS: dict[str, Callable[..., None]] = {
    "nccl": nccl,
    "hierarchical_copy": hierarchical_copy,
}
