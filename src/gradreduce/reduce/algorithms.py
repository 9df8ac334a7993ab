"""Table of the all-reduce algorithms by name."""

from __future__ import annotations

from .algorithm import Algorithm
from .hierarchical_copy import HierarchicalCopy
from .nccl_all_reduce import Nccl

ALGORITHMS: dict[str, type[Algorithm]] = {"nccl": Nccl, "hierarchical_copy": HierarchicalCopy}
