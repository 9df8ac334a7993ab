"""Table of the all-reduce algorithms by name."""

from __future__ import annotations

from gradreduce.arrays.types import AllReduceAlg

from .algorithm import Algorithm
from .hierarchical_copy import HierarchicalCopy
from .nccl_all_reduce import Nccl

ALGORITHMS: dict[AllReduceAlg, type[Algorithm]] = {
    "nccl": Nccl,
    "hierarchical_copy": HierarchicalCopy,
}
