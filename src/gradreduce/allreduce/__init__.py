"""Who adds what where: the all-reduce algorithms, by name."""

from __future__ import annotations

from collections.abc import Callable

from .halves import Halves, as_topology, halves_of
from .hierarchical import hierarchical_copy, works_in_place
from .job import Job, Stage
from .nccl import check_library, connect, nccl

__all__ = [
    "ALGORITHMS",
    "Halves",
    "Job",
    "Stage",
    "as_topology",
    "check_library",
    "connect",
    "halves_of",
    "works_in_place",
]

# Each takes the jobs and, if it takes a topology at all, one from `as_topology`.
ALGORITHMS: dict[str, Callable[..., None]] = {
    "nccl": nccl,
    "hierarchical_copy": hierarchical_copy,
}
