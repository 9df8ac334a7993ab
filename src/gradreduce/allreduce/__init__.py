"""Who adds what where: the all-reduce algorithms, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .hierarchical import hierarchical_copy, works_in_place
from .job import Job
from .nccl import nccl

__all__ = ["ALGORITHMS", "Job", "works_in_place"]

ALGORITHMS: dict[str, Callable[[Sequence[Job]], None]] = {
    "nccl": nccl,
    "hierarchical_copy": hierarchical_copy,
}
