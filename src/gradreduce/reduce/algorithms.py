"""Who adds what where: the all-reduce algorithms, by name."""

from __future__ import annotations

from collections.abc import Callable

from .hierarchical_copy import hierarchical_copy
from .nccl_all_reduce import nccl

__all__ = ["ALGORITHMS"]

# Each takes the jobs and, if it takes a topology at all, one from `as_topology`.
ALGORITHMS: dict[str, Callable[..., None]] = {
    "nccl": nccl,
    "hierarchical_copy": hierarchical_copy,
}
